"""The run directory of translation models."""
