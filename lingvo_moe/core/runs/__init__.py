"""A run's directory: its description, its lock, its evaluations."""
