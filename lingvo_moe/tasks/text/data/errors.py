"""The exception for data that is missing, broken or too small."""

from lingvo_moe.core.input.input_errors import NoHeldOutError, OtherDataError


class DataError(ValueError):
    """Data cannot be used. The message names the path (and line), what is wrong and what would be right."""


class NoDataError(DataError):
    """A directory has no file of data."""


class NoDevSetError(DataError, NoHeldOutError):
    """Data without held-out pairs. The message says where to put them."""


class OtherTextsError(DataError, OtherDataError):
    """The texts are not those that a run began with."""
