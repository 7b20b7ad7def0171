"""The files of a data directory: pairs or texts, their lists, shards, held-out pairs."""
