"""BLEU, chrF and losses on held-out data."""
