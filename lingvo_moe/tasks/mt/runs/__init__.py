"""The run directory: its files, its description, and initialisation from another run."""
