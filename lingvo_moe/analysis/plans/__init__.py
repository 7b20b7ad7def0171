"""Predicts what a compiled program costs on a machine that you do not have: FLOPs, traffic, memory, time.

The input is the compiler's text and figures; no device runs. Only tables.py and memory/state.py, which count parameters
from their specs, need TensorFlow.
"""
