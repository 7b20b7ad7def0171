"""What a compiled program will cost on a machine that is not there: its work, traffic and memory.

Everything here reads text and numbers that a compiler gave and runs no device. Only plan.py, which
counts parameters from their specs, needs TensorFlow.
"""
