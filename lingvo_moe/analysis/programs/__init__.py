"""Reads compiled programs: XLA's text, what its partitioner did, and compiling for machines that are not there."""
