"""Turns a TensorFlow function into a program: traces it, lowers it, and keeps the lines that wrote it."""
