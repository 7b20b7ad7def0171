"""From data to batches: the contract of an input, and the division of a batch."""
