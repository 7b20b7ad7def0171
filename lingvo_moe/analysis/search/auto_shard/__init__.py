"""auto_shard: finds how each operator of a TensorFlow function is sharded over a mesh; see docs/auto_parallel.md."""
