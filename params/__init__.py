"""Registered experiments, a package per task."""
