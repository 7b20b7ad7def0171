"""Turns data into batches: the contract of an input, and the division of a batch."""
