"""The goal of a search: the fastest strategy on a machine, or the machine."""

SPEED = "speed"  # the fastest on the machine that is given
SMALLEST = "smallest"  # the smallest machine that fits, and the fastest there
CHIP_DAYS = "chip_days"  # the machine with the fewest chip-seconds a step
OBJECTIVES = (SPEED, SMALLEST, CHIP_DAYS)
