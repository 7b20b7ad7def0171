"""Hash routing: a token's experts depend on its number in the vocabulary alone.

Roller et al. 2021, Hash Layers For Large Sparse Models (section 3). In the terms of conditional
computation: a router that is not learnt, with a fixed rule.

Letters: G group, S token in group, k choice rank, E expert, M model, V vocabulary.
"""

import numpy as np
import tensorflow as tf

from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, Params as HyperParams
from lingvo_moe.core.moe.routers.unlearned import UnlearnedRouter, spread
from lingvo_moe.core.nested_map import NestedMap

TABLES = ("random", "modular")


class HashRouter(UnlearnedRouter):
    """Every occurrence of a token goes to the same k experts, in every layer and sentence.

    * 'random' (default): the vocabulary is shuffled once, by `table_seed`, and dealt out, so that
      each expert has V/E tokens of it, give or take one. Tokens differ in how often they occur, so
      the load is less even than the table; the paper's balanced table counts occurrences.
    * 'modular': token mod E; no table, and neighbours in the vocabulary (which SentencePiece sorts
      by frequency) go to different experts.

    Balanced the same for each of k choices: see `unlearned.spread`.
    """

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define(
            "table", "random", f"One of {', '.join(TABLES)}: see the class.", checks.one_of(TABLES)
        )
        p.Define("table_seed", 0, "Seed of the random table.", checks.SEED)
        p.OnlyWith("table_seed", lambda p: "" if p.table == "random" else f"table={p.table}")
        p.Define(
            "vocab_size",
            0,
            "V, for the random table; a translation model sets it.",
            checks.Integer(0, checks.IDS.most),
        )
        return p

    @classmethod
    def Needs(cls, params: HyperParams) -> tuple[str, ...]:
        """The token's number."""
        return ("ids",)

    def __init__(self, params: InstantiableParams):
        super().__init__(params)
        p = self.p
        if p.table == "random" and p.vocab_size < 1:
            raise ValueError(
                f"{self.path}.vocab_size={p.vocab_size}: a random table needs the size of the "
                "vocabulary; table='modular' does not"
            )

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
