"""Data, batches, search, runs and the server that tasks over texts share."""
