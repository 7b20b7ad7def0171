"""A translator behind HTTP: limits, batches of concurrent requests, a page to try it. Free of TensorFlow."""
