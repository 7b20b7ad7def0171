"""Benchmarks, which are run by hand and not by the tests."""
