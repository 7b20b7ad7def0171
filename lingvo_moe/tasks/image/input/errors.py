"""The one error of the input."""


class ImageDataError(ValueError):
    """Images cannot be used. The message names the file or directory, what is wrong, and what would be right."""
