"""Search, exported models and streams of lines, for any task over texts."""
