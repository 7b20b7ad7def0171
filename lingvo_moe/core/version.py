"""The version of this package: pyproject.toml reads it; runs and exported models keep it."""

VERSION = "0.1.0"
