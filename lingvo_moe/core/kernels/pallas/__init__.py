"""Kernels that JAX has for TPUs: attention in long rows, and products of groups of rows."""
