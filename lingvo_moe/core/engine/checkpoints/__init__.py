"""Checkpoints, and the weights of other runs."""
