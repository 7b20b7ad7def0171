"""Moves tensors between the memory of a device and that of its host, inside a program."""

import tensorflow as tf

from lingvo_moe.core.private.tensorflow import gen_xla_ops
from lingvo_moe.core.tensors import in_xla

# The custom call that XLA takes for a move; engine/lowering/embedding.py writes its backend_config as XLA expects it.
PLACEMENT = "annotate_device_placement"
_ON_DEVICE, _ON_HOST = "device", "pinned_host"


def to_device(x: tf.Tensor) -> tf.Tensor:
    """A tensor of the host's memory, e.g. a slice of an argument, in the device's."""
    return _placed(x, _ON_DEVICE)


def to_host(x: tf.Tensor) -> tf.Tensor:
    """A tensor of the device's memory in the host's."""
    return _placed(x, _ON_HOST)


def _placed(x: tf.Tensor, memory: str) -> tf.Tensor:
    if not in_xla():
        return x  # TensorFlow's own kernels have one memory
    (placed,) = gen_xla_ops.xla_custom_call_v2(
        operands=[x],
        call_target_name=PLACEMENT,
        backend_config=memory,
        has_side_effect=True,
        result_dtypes=[x.dtype],
        result_shapes=[x.shape],
    )
    return tf.ensure_shape(placed, x.shape)
