"""Pipelines: layers in stages on groups of devices, which work on different micro-batches at the same time."""
