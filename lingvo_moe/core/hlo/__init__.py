"""XLA's text of a program, read: instructions, loops, shardings, collectives, the layer of each.

Nothing here needs TensorFlow or JAX.
"""
