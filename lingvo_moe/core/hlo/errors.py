"""The exception for compiled text that cannot be parsed."""


class HloError(ValueError):
    """The text is not in a form that XLA prints; the message quotes it and says what was expected."""
