"""Command lines, each run as `python -m tools.<name>`; thin layers over the packages."""
