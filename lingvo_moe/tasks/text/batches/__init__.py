"""From the files of a data directory to packed batches that resume exactly where they stopped."""
