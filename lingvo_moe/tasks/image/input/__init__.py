"""From images on a disk to batches."""
