"""Cases: base dilation, which is transposed convolution and the gradient of a strided one (appendix
A.4, figure 13).

`dilated_conv` is XLA's own convolution in one dimension with all of its settings, which TensorFlow's
functions reach only in part; `by_hand` is the same written with gathers and an einsum.
"""

from dataclasses import dataclass

import numpy as np
import tensorflow as tf
from cases_halo import over, rows
from spmd_case import Case, floats
from tensorflow.compiler.tf2xla.python import xla
from tensorflow.compiler.xla import xla_data_pb2


@dataclass(frozen=True)
class Window:
    """The settings of appendix A.4's list, and the sizes that they are applied to.

    Attributes:
        size: of the input's sharded dimension.
        parts: that it is sharded into.
        kernel: the window's size.
        stride, low, high, base, window: stride, paddings (negative ones cut off), base dilation and
            window dilation.
    """

    size: int
    parts: int
    kernel: int
    stride: int = 1
    low: int = 0
    high: int = 0
    base: int = 1
    window: int = 1

    @property
    def results(self) -> int:
        """Returns the number of windows."""
        reach = (self.kernel - 1) * self.window + 1
        return ((self.size - 1) * self.base + 1 + self.low + self.high - reach) // self.stride + 1

    def __str__(self) -> str:
        return (
            f"{self.size}o{self.parts}_k{self.kernel}_s{self.stride}_p{self.low},{self.high}"
            f"_b{self.base}_w{self.window}"
        )


def by_hand(window: Window):
    """(x [N, size, C], w [kernel, C, D]) -> [N, results, D], without any convolution."""

    def fn(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        batch, size, features = x.shape
        holes = tf.zeros([batch, size, window.base - 1, features])
        x = tf.reshape(tf.concat([x[:, :, None], holes], 2), [batch, size * window.base, features])
        margin = 64  # of zeros, so that no window begins or ends outside
        x = tf.pad(x[:, : (size - 1) * window.base + 1], [[0, 0], [margin, margin], [0, 0]])
        starts = tf.range(window.results) * window.stride - window.low + margin
        places = starts[:, None] + tf.range(window.kernel) * window.window
        return tf.einsum("nokc,kcd->nod", tf.gather(x, places, axis=1), w)

    return fn


def dilated_conv(window: Window):
    """Computes `by_hand` by XLA's convolution and its gradients, which are convolutions, in which
    stride and base dilation change places."""
    k = window
    reach = (k.kernel - 1) * k.window + 1
    dilated = (k.size - 1) * k.base + 1
    spread = (k.results - 1) * k.stride + 1  # of the results, with holes for the stride

    @tf.custom_gradient
    def fn(x: tf.Tensor, w: tf.Tensor):
        y = _conv(k.results, x, w, "NWC,WIO", k.stride, (k.low, k.high), k.base, k.window)

        def gradient(dy: tf.Tensor):
            low = reach - 1 - k.low
            high = (k.size - 1) * k.base + reach - spread - low
            turned = tf.transpose(tf.reverse(w, [0]), [0, 2, 1])
            dx = _conv(k.size, dy, turned, "NWC,WIO", k.base, (low, high), k.stride, k.window)
            high = reach - 1 + spread - dilated - k.low
            dw = _conv(k.kernel, x, dy, "CWN,IWO", k.window, (k.low, high), k.base, k.stride)
            return dx, tf.transpose(dw, [1, 0, 2])

        return y, gradient

    def cut(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        return rows(k.parts)(fn(rows(k.parts)(x), w))

    return cut


def _conv(
    count: int, x, w, letters: str, stride: int, padding: tuple[int, int], base: int, window: int
):
    """XLA's 1D convolution; `letters` name the dimensions of x and w, the result is [N, count, O]."""
    lhs, rhs = letters.split(",")
    numbers = xla_data_pb2.ConvolutionDimensionNumbers(
        input_batch_dimension=lhs.index("N"),
        input_feature_dimension=lhs.index("C"),
        input_spatial_dimensions=[lhs.index("W")],
        kernel_input_feature_dimension=rhs.index("I"),
        kernel_output_feature_dimension=rhs.index("O"),
        kernel_spatial_dimensions=[rhs.index("W")],
        output_batch_dimension=0,
        output_feature_dimension=2,
        output_spatial_dimensions=[1],
    )
    y = xla.conv(x, w, [stride], [padding], [base], [window], numbers)
    y.set_shape([x.shape[lhs.index("N")], count, w.shape[rhs.index("O")]])
    return y


def _case(number: int, window: Window, forward: dict[str, int], gradient: dict[str, int]) -> Case:
    return Case(
        f"figure_13_case_{number}_{window}",
        dilated_conv(window),
        (floats(2, window.size, 3), floats(window.kernel, 3, 2)),
        mesh=f"d:{window.parts}",
        forward=forward,
        backward=gradient,
        whole=True,
        reference=by_hand(window),
    )


def _permuted(count: int) -> tuple[dict[str, int], dict[str, int]]:
    # The kernel's gradient has both a dilated base and a dilated window: XLA gathers its two operands.
    return {"collective-permute": count}, {"collective-permute": count, "all-gather": 2}


FIGURE_13 = [
    # Case 1, stride * per_shard_window_count divisible by dilation: every part begins in the same hole.
    _case(1, Window(8, 4, 3, 1, 1, 2, base=2), *_permuted(1)),
    _case(1, Window(16, 4, 5, 2, 2, 3, base=4), *_permuted(1)),
    # Case 2, stride 1 and not divisible: the largest low padding for all, and a slice of the results.
    _case(2, Window(8, 4, 3, 1, 0, 0, base=3), *_permuted(2)),
    # Case 3, neither. Differs: the paper pads the window; XLA gathers the input.
    _case(3, Window(12, 4, 3, 2, 0, 0, base=3), {"all-gather": 1}, {"all-gather": 2}),
]


def transposed(stride: int, padding: str, *cut_dims: str | None, mesh: str):
    """tf.nn.conv2d_transpose: stride as base dilation; input and result sharded along the spatial
    dimensions that are given a mesh axis."""
    cut = over(mesh, None, *cut_dims, None)

    def fn(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        sizes = [
            n * stride if padding == "SAME" else (n - 1) * stride + w.shape[i]
            for i, n in enumerate(x.shape[1:3])
        ]
        shape = [x.shape[0], *sizes, w.shape[2]]
        return cut(tf.nn.conv2d_transpose(cut(x), w, shape, stride, padding))

    return fn


def _transposed_case(size, mesh, stride, kernel, padding, permutes) -> Case:
    moved = {"collective-permute": permutes} if permutes else {}
    back = {"collective-permute": 2 * permutes} if permutes else {}
    return Case(
        f"transposed_{size}_over_{mesh[-1]}_stride_{stride}_kernel_{kernel}_{padding.lower()}",
        transposed(stride, padding, "d", None, mesh=mesh),
        (floats(2, size, 2, 3), floats(kernel, 2, 2, 3)),
        mesh=mesh,
        forward=moved,
        backward={**back, "all-reduce": 1},
        whole=True,
    )


TRANSPOSED = [
    _transposed_case(8, "d:4", 2, 3, "SAME", 1),
    _transposed_case(15, "d:4", 2, 3, "SAME", 1),
    Case(
        "transposed_rows_and_columns",
        transposed(2, "SAME", "y", "x", mesh="y:2,x:4"),
        (floats(2, 4, 8, 3), floats(3, 3, 2, 3)),
        mesh="y:2,x:4",
        forward={"collective-permute": 2},
        backward={"collective-permute": 4, "all-reduce": 1},
        several_processes=True,
    ),
]


def _random_windows(parts: int, count: int) -> list[Window]:
    """Windows of every setting at once, the same every time; each part has at least one result.

    The last window reaches back to the input, and low padding stays below the window's reach: beyond
    that are `cases_halo.WRONG_KERNEL_GRADIENT` and `cases_halo.ABORTED`.
    """
    random = np.random.RandomState(parts)
    windows: list[Window] = []
    while len(windows) < count:
        kernel, dilation = random.randint(1, 6), random.randint(1, 4)
        window = Window(
            size=random.randint(8, 21),
            parts=parts,
            kernel=kernel,
            stride=random.randint(1, 4),
            low=random.randint(0, (kernel - 1) * dilation + 1),
            high=random.randint(-2, 5),
            base=random.randint(1, 5),
            window=dilation,
        )
        reach = (window.results - 1) * window.stride - window.low
        if window.results >= parts and reach <= (window.size - 1) * window.base:
            windows.append(window)
    return windows


def _together(windows: list[Window], make):
    """One program of several windows, which is quicker to compile than several programs."""

    def fn(*args: tf.Tensor) -> tuple[tf.Tensor, ...]:
        pairs = zip(args[::2], args[1::2], strict=True)
        return tuple(make(window)(x, w) for window, (x, w) in zip(windows, pairs, strict=True))

    return fn


def _sweep(number: int, windows: list[Window]) -> Case:
    args = [a for w in windows for a in (floats(1, w.size, 2), floats(w.kernel, 2, 2))]
    return Case(
        f"sweep_{windows[0].parts}_parts_{number}",
        _together(windows, dilated_conv),
        args,
        mesh=f"d:{windows[0].parts}",
        gradients=None if number == 0 else (),  # most of the time that these take
        whole=True,
        reference=_together(windows, by_hand),
    )


SWEEP = [_sweep(i, _random_windows(parts, 14)[7 * i : 7 * i + 7]) for parts, i in ((4, 0), (8, 1))]

CASES = [*FIGURE_13, *TRANSPOSED, *SWEEP]
