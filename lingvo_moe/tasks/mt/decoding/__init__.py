"""From a model and its weights to translations."""
