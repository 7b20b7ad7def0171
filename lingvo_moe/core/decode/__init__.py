"""Decoding: beam search over any model that extends hypotheses one token at a time."""
