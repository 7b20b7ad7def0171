"""Experiments of image classification."""
