"""From a TensorFlow function to a program: traced, lowered, with the lines that wrote it."""
