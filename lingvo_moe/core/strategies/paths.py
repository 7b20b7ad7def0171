"""The parameters that make up a strategy: how a model lies on devices, and the types in which it computes."""

# Those that a search always sets.
CHOSEN = (
    "train.mesh",
    "train.shard_state",
    "train.offload",
    "train.num_micro_batches",
    "task.activation_split",
    "task.weight_split",
    "task.repeat",
    "task.remat",
    "task.pipeline.stages",
    "task.pipeline.micro_batches",
    "task.pipeline.schedule",
    "task.pipeline.repeats",
    "task.pipeline.splits",
)
PATHS = (*CHOSEN, "task.dtype", "task.fprop_dtype")
