"""The page of a run, and which expert gets which language."""
