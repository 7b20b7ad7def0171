"""Builds a corpus from installed packages."""
