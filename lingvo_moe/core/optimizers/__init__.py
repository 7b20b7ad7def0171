"""Optimizers as pure functions of (theta, gradients, slots, step)."""
