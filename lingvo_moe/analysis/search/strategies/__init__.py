"""Strategies: how a model is laid over the devices of a machine, which ones there are, and what each should cost."""
