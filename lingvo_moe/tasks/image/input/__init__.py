"""Reads images from a disk and makes batches of them."""
