"""Pipelines: layers in stages, which work on different micro-batches at the same time."""
