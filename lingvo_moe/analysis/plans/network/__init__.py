"""The seconds of a collective: the interconnect models of TPU slices and GPU clusters."""
