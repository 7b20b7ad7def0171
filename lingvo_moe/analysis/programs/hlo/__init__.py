"""Parses XLA's text of a program: instructions, loops, shardings, collectives, and their layers.

Nothing here needs TensorFlow or JAX.
"""
