"""The work of a compiled program's instructions: FLOPs, traffic, and seconds on a machine."""
