"""What a compiled program will cost on a machine that is not there: its work, traffic and memory.

Everything here reads text and numbers that a compiler gave; it runs no device and imports neither
TensorFlow nor JAX.
"""
