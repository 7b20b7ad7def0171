"""The error of a program or a machine that cannot be planned."""


class PlanError(ValueError):
    """The request cannot be planned; the message gives the value and what would be right."""
