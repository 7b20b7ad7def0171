"""The parameters that make up a strategy: how a model lies on devices, and the types in which it computes."""

PATHS = (
    "train.mesh",
    "train.shard_state",
    "train.offload",
    "train.num_micro_batches",
    "task.activation_split",
    "task.weight_split",
    "task.repeat",
    "task.remat",
    "task.dtype",
    "task.fprop_dtype",
    "task.pipeline.stages",
    "task.pipeline.micro_batches",
    "task.pipeline.schedule",
    "task.pipeline.repeats",
    "task.pipeline.splits",
)
