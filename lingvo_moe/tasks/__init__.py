"""Tasks: what the framework is used for."""
