"""Translation experiments."""
