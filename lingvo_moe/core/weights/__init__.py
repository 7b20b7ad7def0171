"""Weights that others wrote, and the names and layouts that others give them."""
