"""Searches for a strategy: of models by their parameters, and of functions by their operators."""
