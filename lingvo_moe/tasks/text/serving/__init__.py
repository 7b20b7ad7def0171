"""A translator or a generator of texts behind HTTP; nothing here imports TensorFlow."""
