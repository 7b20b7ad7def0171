"""Hash routing: a token's experts depend on its number in the vocabulary alone.

Roller et al. 2021, Hash Layers For Large Sparse Models (section 3). In the terms of conditional
computation: a router that is not learnt, with a fixed rule.

Letters: G group, S token in group, k choice rank, E expert, M model, V vocabulary.
"""

import tokenize
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_moe.core.base_layer import WeightParams
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import (
    InstantiableParams,
    ParamError,
    Params as HyperParams,
)
from lingvo_moe.core.initializers import InitOfVariable, WeightInit
from lingvo_moe.core.moe.routers.losses_and_metrics import Choice
from lingvo_moe.core.moe.routers.unlearned import UnlearnedRouter, spread
from lingvo_moe.core.nested_map import NestedMap

TABLES = ("by_layer", "random", "modular", "file")
_VARIABLES = ("by_layer", "file")  # tables that are a variable


class TableInit(InitOfVariable):
    """A variable [V], or [L,V] of L layers in a stack, starts as the int32 [L,V] of a file."""

    def __init__(self, file: str):
        super().__init__("constant", 0.0)
        self._file = file

    def OfVariable(self, spec: Any, seed: tf.Tensor) -> tf.Tensor:
        """See `InitOfVariable`. Raises ParamError: the file holds no such table, or one of other sizes."""
        # Floats are exact for the numbers of any vocabulary.
        table_LV = np.clip(self._Table(spec), 0, 1 << 24)
        return tf.constant(table_LV.reshape(spec.shape), spec.dtype)

    def Check(self, spec: Any) -> None:
        """See `InitOfVariable`."""
        self._Table(spec)

    def _Table(self, spec: Any) -> np.ndarray:
        """The file's int32 [L,V], of the variable `table` of a router."""
        name = f"{spec.path}_file"
        want = spec.shape if spec.stack_dims else (1, *spec.shape)
        why = f"must be a table of tools.report --tables_dir, int32 {list(want)}"
        try:
            table_LV = np.lib.format.open_memmap(self._file, mode="r")
        except (OSError, ValueError, SyntaxError, tokenize.TokenError) as e:
            raise ParamError(name, self._file, f"{why}: {e}") from None
        if table_LV.dtype != np.int32 or table_LV.shape != want:
            why += f", and is {table_LV.dtype} {list(table_LV.shape)}"
            raise ParamError(name, self._file, why)
        return table_LV


class HashRouter(UnlearnedRouter):
    """Every occurrence of a token goes to the same k experts of a layer, in every sentence.

    * 'by_layer' (default): each layer shuffles the vocabulary by itself and deals it out, so that each expert has V/E
      tokens of it, give or take one. Tokens that share an expert in one layer rarely do in the next. Tokens differ in
      how often they occur, so the load is less even than the table; the paper's balanced table counts occurrences.
    * 'random': the same, but shuffled once for all layers, by `table_seed`.
    * 'modular': token mod E; no table, and neighbours in the vocabulary (which SentencePiece sorts
      by frequency) go to different experts.
    * 'file': a table for each layer, of a trained model's choices, from `table_file`.

    A table of each layer is a variable that is not trained: it is drawn or read only where weights begin, and goes with
    the checkpoints. Balanced the same for each of k choices: see `unlearned.spread`.
    """

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define(
            "table",
            "by_layer",
            f"One of {', '.join(TABLES)}: see the class.",
            checks.one_of(TABLES),
        )
        p.Define(
            "table_file",
            "",
            "With table 'file': RUN/tables/encoder.npy of tools.report --tables_dir.",
        )
        p.OnlyWith("table_file", lambda p: "" if p.table == "file" else f"table={p.table}")
        p.Define("table_seed", 0, "Seed of the random table.", checks.SEED)
        p.OnlyWith("table_seed", lambda p: "" if p.table == "random" else f"table={p.table}")
        p.Define(
            "vocab_size",
            0,
            "V, for a table; a translation model sets it.",
            checks.Integer(0, checks.IDS.most),
        )
        return p

    @classmethod
    def Needs(cls, params: HyperParams) -> tuple[str, ...]:
        """The token's number."""
        return ("ids",)

    def __init__(self, params: InstantiableParams):
        params = params.Copy()
        params.weight_split = {"table.V": None, **(params.weight_split or {})}
        super().__init__(params)
        p = self.p
        if p.table != "modular" and p.vocab_size < 1:
            raise ValueError(
                f"{self.path}.vocab_size={p.vocab_size}: a {p.table} table needs the size of the "
                "vocabulary; table='modular' does not"
            )
        if p.table == "file" and not p.table_file:
            why = "table='file' needs a file of tools.report --tables_dir"
            raise ParamError(f"{self.path}.table_file", "''", why)
        if p.table in _VARIABLES:
            init = TableInit(p.table_file) if p.table == "file" else WeightInit.Permutation()
            self.CreateVariable(
                "table", WeightParams((p.vocab_size,), "V", init, "float32", trainable=False)
            )

    def Choose(
        self,
        theta: NestedMap,
        x_GSM: tf.Tensor,
        paddings_GS: tf.Tensor,
        capacity: int | None = None,
        seed: tf.Tensor | None = None,
        context: NestedMap | None = None,
    ) -> Choice:
        """See `Router`; with a table of each layer theta holds table [V]."""
        if self.p.table in _VARIABLES:
            assert context is not None
            # A moving average of the weights may be off by its rounding.
            number_GS = tf.gather(tf.cast(tf.round(theta.table), tf.int32), context.ids)
            context = NestedMap(context, ids=number_GS)
        return super().Choose(theta, x_GSM, paddings_GS, capacity, seed, context)

    def Rule(
        self, x_GSM: tf.Tensor, seed: tf.Tensor | None, context: NestedMap | None
    ) -> tf.Tensor:
        """See `UnlearnedRouter`; `context.ids` must lie in 0..V-1."""
        assert context is not None
        number_GS = context.ids
        if self.p.table == "random":
            # The old generator, whose streams NumPy promises never to change.
            shuffled_V = np.random.RandomState(self.p.table_seed).permutation(self.p.vocab_size)
            number_GS = tf.gather(tf.constant(shuffled_V, tf.int32), number_GS)
        return self.Shard(spread(number_GS, self.p.k, self.p.num_experts), "GSk")
