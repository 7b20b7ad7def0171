"""The contenders that other libraries make, each run by the Python of its own environment."""
