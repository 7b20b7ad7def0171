"""Errors of data that a run lacks. Free of NumPy, so that a command that reads lines starts without it."""


class NoHeldOutError(ValueError):
    """There are no held-out examples. The message says where they could be."""


class OtherDataError(ValueError):
    """The data are not those that a run began with, so that it cannot go on at its place in them."""
