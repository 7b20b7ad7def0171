"""Params, checks of their values, classes and experiments by name."""
