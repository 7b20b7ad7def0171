"""Pipelines: layers one after the other on groups of devices, which work on different micro-batches."""
