"""The exception for data that is missing, broken or too small."""


class DataError(ValueError):
    """Data cannot be used. The message names the path (and line), what is wrong and what would be right."""
