"""Packed batches of the files of a data directory, which resume exactly where they stopped."""
