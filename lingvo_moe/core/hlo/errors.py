"""The error of compiled text that cannot be read."""


class HloError(ValueError):
    """The text is not what XLA prints; the message quotes it and says what was expected."""
