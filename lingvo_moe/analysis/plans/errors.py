"""The exception for a program or a machine that cannot be planned."""


class PlanError(ValueError):
    """A request cannot be planned; the message names the value and what would be right."""
