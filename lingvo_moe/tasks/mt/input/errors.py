"""The one error of the input: data that is missing, broken or too small, said in a sentence that helps."""


class DataError(ValueError):
    """Data cannot be used. The message names the path (and line), what is wrong and what would be right."""
