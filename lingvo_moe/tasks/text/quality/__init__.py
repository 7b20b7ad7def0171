"""Losses and log-probabilities of given texts."""
