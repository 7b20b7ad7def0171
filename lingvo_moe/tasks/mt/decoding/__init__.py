"""Translates text with a model and its weights."""
