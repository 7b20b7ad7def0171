"""Conv2D. Letters: B batch, Y rows, X columns, I channels of the input, O channels of the output."""

import math
from collections.abc import Sequence
from typing import ClassVar

import tensorflow as tf

from lingvo_moe.core.base_layer import BaseLayer, WeightParams
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params as HyperParams
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.nested_map import NestedMap

PADDINGS = ("SAME", "VALID")


class Conv2D(BaseLayer):
    """A two-dimensional convolution, with the kernel 'YXIO' and, if `p.bias`, a bias 'O'.

    The result is annotated, so images that are sharded along their rows or columns stay so: the
    devices exchange the borders of their parts (halos) and no device ever holds an image. XLA's
    partitioner computes the kernel's gradient wrongly where rows or columns are sharded and some mesh
    axis shards neither them nor the batch: shard the batch along every other axis.
    """

    PART: ClassVar[str] = "convolution"

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("input_channels", 0, "I.", checks.SIZE)
        p.Define("output_channels", 0, "O.", checks.SIZE)
        p.Define("kernel_size", 3, "Rows and columns of the kernel.", checks.SIZE)
        p.Define("stride", 1, "Rows and columns from one window to the next.", checks.SIZE)
        p.Define(
            "padding",
            "SAME",
            "SAME: ceil(rows / stride) rows, zeros around the image; VALID: only windows inside it.",
            checks.one_of(PADDINGS),
        )
        p.Define("bias", False, "Whether to add a bias to each output channel.")
        return p

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        p = self.p
        shape = (p.kernel_size, p.kernel_size, p.input_channels, p.output_channels)
        # He et al. 2015: keeps the variance through a rectifier.
        he = WeightInit.Gaussian(math.sqrt(2 / math.prod(shape[:3])))
        self.CreateVariable("w", WeightParams(shape, "YXIO", he))
        if p.bias:
            self.CreateVariable("b", WeightParams.Vector((p.output_channels,), "O", 0.0))

    def FProp(self, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        """Convolves x [B, Y, X, I]; returns [B, Y', X', O] in the activations' type."""
        y = tf.nn.conv2d(x, self.Cast(theta.w), self.p.stride, self.p.padding)
        if self.p.bias:
            y += self.Cast(theta.b)
        return self.Shard(y, "BYXO")

    @classmethod
    def FPropMeta(cls, params: HyperParams, *input_shapes: Sequence[int]) -> NestedMap:
        """A product and a sum for each number of the kernel at each place of the output; the bias takes
        the place of the sum that a window has less than products."""
        p = params
        batch, height, width, channels = input_shapes[0]
        if channels != p.input_channels:
            raise ValueError(
                f"{p.name}: an input of {channels} channels, but input_channels={p.input_channels}"
            )
        rows, columns = (
            num_windows(n, p.kernel_size, p.stride, p.padding) for n in (height, width)
        )
        taps = p.kernel_size**2 * channels * p.output_channels
        return NestedMap(
            flops=2 * batch * rows * columns * taps,
            out_shapes=((batch, rows, columns, p.output_channels),),
        )


def num_windows(size: int, window: int, stride: int, padding: str) -> int:
    """The number of windows along a dimension of `size` elements.

    Raises ValueError: with padding VALID, a window longer than the dimension.
    """
    if padding == "SAME":
        return -(-size // stride)
    if window > size:
        raise ValueError(f"a window of {window} with padding VALID over {size} elements")
    return (size - window) // stride + 1
