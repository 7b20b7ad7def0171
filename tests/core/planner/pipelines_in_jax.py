"""Small pipelines in JAX, for tests of the planner: each schedule's loops over ticks, with their name scopes.

All stages work in every tick, on rubbish where they have no micro-batch, and pass on what they computed. Stages that
work on rubbish are not masked: only the programs' loops matter here, and no number that they compute is read.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

ROWS, DIM, HIDDEN = 8, 64, 128
SCOPE = "m4/encoder"


def _stage(w: Any, x: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ w["i"]) @ w["o"]


def _backward(w: Any, x: jax.Array, dy: jax.Array) -> tuple[Any, jax.Array]:
    return jax.vjp(_stage, w, x)[1](dy)


def _input_gradient(w: Any, x: jax.Array, dy: jax.Array) -> jax.Array:
    return jax.vjp(lambda x: _stage(w, x), x)[1](dy)[0]


def _weight_gradient(w: Any, x: jax.Array, dy: jax.Array) -> Any:
    return jax.vjp(lambda w: _stage(w, x), w)[1](dy)[0]


class Pipeline:
    """A pipeline of `stages` stages over the axis `stage` of a mesh.

    Args:
        mesh: has an axis 'stage'.
        stages: K.
        num: M.
    """

    def __init__(self, mesh: Mesh, stages: int, num: int):
        self.mesh, self.stages, self.num = mesh, stages, num

    def compiled_text(self, schedule: str, repeats: int = 1, lower_for: str = "cpu") -> str:
        """The compiled program of a schedule: 'gpipe', '1f1b', 'interleaved' or 'zb_h1'."""
        loops = {
            "gpipe": self._gpipe(self.num),
            "interleaved": self._gpipe(self.num * repeats),
            "1f1b": self._one_f_one_b(split=False),
            "zb_h1": self._one_f_one_b(split=True),
        }[schedule]
        weights = {"i": (self.stages, DIM, HIDDEN), "o": (self.stages, HIDDEN, DIM)}
        args = [
            {name: self._spec(shape) for name, shape in weights.items()},
            self._spec((self.stages, ROWS, DIM)),
        ]
        traced = jax.jit(loops).trace(*args)
        return traced.lower(lowering_platforms=(lower_for,)).compile().as_text()

    def _spec(self, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(self.mesh, PartitionSpec("stage"))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    def _split(self, tree: Any) -> Any:
        sharding = NamedSharding(self.mesh, PartitionSpec("stage"))
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, sharding), tree)

    def _loop(self, phase: str, ticks: int, tick: Callable[[Any], Any], carry: Any) -> Any:
        with jax.named_scope(f"{SCOPE}/pipeline.{phase}"):
            return jax.lax.fori_loop(0, ticks, lambda _, c: self._split(tick(c)), carry)

    def _carry(self, w: Any, x: jax.Array) -> dict[str, Any]:
        return {"x": x, "dy": x + 1, "dw": jax.tree.map(jnp.zeros_like, w)}

    def _forward_tick(self, w: Any, c: dict[str, Any]) -> dict[str, Any]:
        return c | {"x": jnp.roll(jax.vmap(_stage)(w, c["x"]), 1, 0)}

    def _backward_tick(self, w: Any, c: dict[str, Any]) -> dict[str, Any]:
        dw, dx = jax.vmap(_backward)(w, c["x"], c["dy"])
        return c | {"dw": jax.tree.map(jnp.add, c["dw"], dw), "dy": jnp.roll(dx, -1, 0)}

    def _input_tick(self, w: Any, c: dict[str, Any]) -> dict[str, Any]:
        dx = jax.vmap(_input_gradient)(w, c["x"], c["dy"])
        return c | {"dy": jnp.roll(dx, -1, 0)}

    def _weight_tick(self, w: Any, c: dict[str, Any]) -> dict[str, Any]:
        dw = jax.vmap(_weight_gradient)(w, c["x"], c["dy"])
        return c | {"dw": jax.tree.map(jnp.add, c["dw"], dw), "dy": c["dy"] * 0.5}

    def _gpipe(self, ticks: int) -> Callable[[Any, jax.Array], Any]:
        in_all = ticks + self.stages - 1

        def step(w: Any, x: jax.Array) -> Any:
            c = self._carry(w, x)
            c = self._loop("forward", in_all, lambda c: self._forward_tick(w, c), c)
            return self._loop("backward", in_all, lambda c: self._backward_tick(w, c), c)

        return step

    def _one_f_one_b(self, split: bool) -> Callable[[Any, jax.Array], Any]:
        ends = self.stages - 1
        back = self._input_tick if split else self._backward_tick

        def step(w: Any, x: jax.Array) -> Any:
            c = self._carry(w, x)
            c = self._loop("forward", ends, lambda c: self._forward_tick(w, c), c)
            both = lambda c: back(w, self._forward_tick(w, c))  # noqa: E731
            c = self._loop("forward_backward", self.num, both, c)
            c = self._loop("backward", ends, lambda c: back(w, c), c)
            if split:  # stages that are idle in the last loop could do K - 1 of these there
                left = self.num - ends
                c = self._loop("weight_gradients", left, lambda c: self._weight_tick(w, c), c)
            return c

        return step
