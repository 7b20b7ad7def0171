"""The error of a program or a machine that cannot be planned."""


class PlanError(ValueError):
    """What was asked cannot be planned; the message says what was met and what would be right."""
