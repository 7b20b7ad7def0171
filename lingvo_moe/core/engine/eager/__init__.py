"""Runs programs over a mesh from eager code."""
