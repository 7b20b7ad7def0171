"""The training loop, and what goes on beside it."""
