"""What the instructions of a compiled program do: FLOPs, traffic, and seconds on a machine."""
