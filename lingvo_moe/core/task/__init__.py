"""A task: a model with a loss, and its training steps."""
