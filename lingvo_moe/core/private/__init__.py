"""The only modules that use private parts of TensorFlow and JAX."""
