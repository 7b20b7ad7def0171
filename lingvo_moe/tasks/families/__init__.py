"""Families of published models: how each writes its parameters and names its weights."""
