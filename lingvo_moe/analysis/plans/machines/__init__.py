"""The machines that a plan can be for: TPU slices, GPU clusters, and rings in round figures."""
