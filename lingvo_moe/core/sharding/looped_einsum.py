"""An einsum of two operands that are both too large to be gathered (paper, section 3.3.2, figure 4c).

Both operands are sharded along a dimension that is not contracted, over the same devices. A device
cannot compute its part of the result from its parts of the operands, and gathering one operand takes
memory for all of it. So a loop computes the result slice by slice: in each iteration every device
multiplies its part of the left operand by its current slice of the right one, and passes the slice to
its neighbour.
"""

import tensorflow as tf

from lingvo_moe.core.private import tensorflow as private
from lingvo_moe.core.sharding.annotate import mesh_of
from lingvo_moe.core.sharding.letters import DimsMapping
from lingvo_moe.core.sharding.manual import device_index, manual_region, rotate
from lingvo_moe.core.sharding.mesh import Mesh, ShardingError


def looped_einsum(
    equation: str,
    lhs: tf.Tensor,
    rhs: tf.Tensor,
    axis: str,
    letters: str = "",
    mesh: Mesh | str | None = None,
) -> tf.Tensor:
    """`tf.einsum(equation, lhs, rhs)` with both operands sharded over `axis`, without gathering either.

    With n devices along the axis, a device holds 1/n of each operand, two slices of the right one in
    flight, and 1/n of the result. n times 1/n of the right operand crosses each link, one slice more
    than if it were gathered. The gradients are loops of the same kind, in which a slice of the right
    operand and its gradient are passed on.

    Args:
        equation: of two operands, e.g. 'IK,JK->IJ'; each letter is in at least two of the three terms,
            and at most once in each.
        lhs: the left operand, which is annotated here: the first of `letters` sharded over the axis.
        rhs: the right operand, likewise with the second.
        axis: a mesh axis. Along other axes operands and result are replicated.
        letters: one of lhs and the result only, then one of rhs and the result only, e.g. 'IJ'; by default the first
            such letter of each.

    Returns:
        The result, sharded along the first of `letters` over the axis, unsharded along the second.

    Raises:
        ShardingError: no mesh is in force; an unknown axis, or several; an equation of another form; no
            such letters; a dimension that does not divide evenly.
    """
    what = f"looped_einsum({equation!r}, axis={axis!r})"
    mesh = mesh_of(what, mesh)
    terms = _Terms(what, equation, letters)
    if not isinstance(axis, str):
        raise ShardingError(f"{what}: axis must be the name of one mesh axis")
    if mesh.axis_size(axis) == 1:
        return tf.einsum(equation, lhs, rhs)
    region = manual_region(
        lambda a, b: _looped(terms, a, b, axis, mesh),
        [terms.Mapping(terms.lhs, terms.i, axis), terms.Mapping(terms.rhs, terms.j, axis)],
        terms.Mapping(terms.out, terms.i, axis),
        mesh,
    )
    return region(lhs, rhs)


class _Terms:
    """A checked equation; `i` and `j` are the letters that are sharded."""

    def __init__(self, what: str, equation: str, sharded: str):
        equation = equation.replace(" ", "")
        operands, arrow, self.out = equation.partition("->")
        self.lhs, comma, self.rhs = operands.partition(",")
        terms = (self.lhs, self.rhs, self.out)
        letters = set("".join(terms))
        if sharded and len(sharded) != 2:
            raise ShardingError(
                f"{what}: letters={sharded!r} has to be one of each operand, e.g. 'IJ'"
            )
        if not arrow or not comma or not all(t.isalpha() for t in letters):
            raise ShardingError(f"{what}: expected an equation of two operands such as 'IK,JK->IJ'")
        for letter in sorted(letters):
            if max(t.count(letter) for t in terms) > 1 or sum(letter in t for t in terms) < 2:
                raise ShardingError(
                    f"{what}: letter {letter!r} has to be in two of the three terms at least, and not "
                    "twice in one"
                )
        self.i = self._Free(what, "lhs", sharded[:1])
        self.j = self._Free(what, "rhs", sharded[1:])

    def _Free(self, what: str, name: str, letter: str) -> str:
        term, other = (self.lhs, self.rhs) if name == "lhs" else (self.rhs, self.lhs)
        free = [x for x in term if x in self.out and x not in other]
        if not free:
            raise ShardingError(
                f"{what}: {name} shares all its letters with the other operand, so a loop has no benefit"
            )
        if letter and letter not in free:
            raise ShardingError(
                f"{what}: letters has {letter!r}, which has to be in {name} and the result alone: one of {free}"
            )
        return letter or free[0]

    def Mapping(self, term: str, letter: str, axis: str) -> DimsMapping:
        return tuple(axis if x == letter else None for x in term)


def _looped(terms: _Terms, lhs: tf.Tensor, rhs: tf.Tensor, axis: str, mesh: Mesh) -> tf.Tensor:
    """`looped_einsum` on local tensors: lhs with 1/n of i, rhs with 1/n of j; the result has all of j."""
    turns, lhs_term, rhs_term, out_term = mesh.axis_size(axis), terms.lhs, terms.rhs, terms.out
    place = out_term.index(terms.j)

    @private.custom_gradient
    def looped(lhs: tf.Tensor, rhs: tf.Tensor) -> tuple:
        here = device_index(axis, mesh)

        def turn(t: tf.Tensor, rhs: tf.Tensor, out: tf.TensorArray) -> tuple:
            product = tf.einsum(f"{lhs_term},{rhs_term}->{out_term}", lhs, rhs)
            out = out.write((here + t) % turns, product)
            return t + 1, rotate(rhs, axis, mesh), out

        out = tf.TensorArray(lhs.dtype, turns)
        _, _, out = _loop(turns, turn, rhs, out)
        result = _merge(out.stack(), place)

        def grad(dout: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            here = device_index(axis, mesh)
            slices = _split(dout, place, turns)

            def turn(
                t: tf.Tensor, rhs: tf.Tensor, dlhs: tf.Tensor, drhs: tf.Tensor
            ) -> tuple[tf.Tensor, ...]:
                dproduct = tf.gather(slices, (here + t) % turns)
                dlhs += tf.einsum(f"{out_term},{rhs_term}->{lhs_term}", dproduct, rhs)
                drhs += tf.einsum(f"{out_term},{lhs_term}->{rhs_term}", dproduct, lhs)
                # A slice's gradient moves with it; after all iterations both are back on their device.
                return t + 1, rotate(rhs, axis, mesh), dlhs, rotate(drhs, axis, mesh)

            dlhs, drhs = tf.zeros(lhs.shape, lhs.dtype), tf.zeros(rhs.shape, rhs.dtype)
            _, _, dlhs, drhs = _loop(turns, turn, rhs, dlhs, drhs)
            return dlhs, drhs

        return result, grad

    return looped(lhs, rhs)


def _loop(turns: int, turn, *start) -> tuple:
    return tf.while_loop(
        lambda t, *_: t < turns, turn, (tf.constant(0), *start), maximum_iterations=turns
    )


def _merge(slices: tf.Tensor, place: int) -> tf.Tensor:
    """Joins slices: [n, ..., j/n, ...] to [..., j, ...]."""
    turns, *shape = slices.shape.as_list()
    order = [*range(1, place + 1), 0, *range(place + 1, slices.shape.rank)]
    shape[place] *= turns
    return tf.reshape(tf.transpose(slices, order), shape)


def _split(x: tf.Tensor, place: int, turns: int) -> tf.Tensor:
    """The inverse of _merge."""
    shape = x.shape.as_list()
    x = tf.reshape(x, [*shape[:place], turns, shape[place] // turns, *shape[place + 1 :]])
    return tf.transpose(x, [place, *range(place), *range(place + 1, x.shape.rank)])
