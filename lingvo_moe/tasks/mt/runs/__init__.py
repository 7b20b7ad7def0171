"""What a run directory holds and says of itself."""
