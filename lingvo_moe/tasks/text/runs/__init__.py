"""The run directory of tasks over texts, and the weights in it."""
