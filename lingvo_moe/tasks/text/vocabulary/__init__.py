"""Vocabularies: made from data, or from a tokenizer.json."""
