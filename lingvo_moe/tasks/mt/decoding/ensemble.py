"""Several models of the same vocabularies as one, which gives each token the mean of their probabilities."""

import math
import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from lingvo_moe.core.engine.checkpoints.run_weights import Chosen
from lingvo_moe.core.kernels.weights import Packing
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.mt.decode_step import TranslationModel
from lingvo_moe.tasks.mt.decoding.translator import TranslateOptions, Translator, read_parts


class Ensemble:
    """A TranslationModel of several; theta and caches have those of model i as `m<i>`.

    Raises ValueError: they score different numbers of tokens.
    """

    def __init__(self, models: Sequence[TranslationModel]):
        self._models = {f"m{i}": model for i, model in enumerate(models)}
        self.p = models[0].p
        if len(sizes := {model.p.target_vocab_size for model in models}) > 1:
            raise ValueError(f"the models of an ensemble have different target_vocab_size: {sizes}")

    def PackWeights(self, theta: NestedMap, packing: Packing) -> NestedMap:
        """See BaseLayer."""
        return self._each(lambda model, w: model.PackWeights(w, packing), theta)

    def Encode(self, theta: NestedMap, src: NestedMap) -> NestedMap:
        return self._each(lambda model, w: model.Encode(w, src), theta)

    def InitCache(
        self, theta: NestedMap, encoded: NestedMap, beam_size: int, max_length: int
    ) -> NestedMap:
        return self._each(
            lambda model, w, x: model.InitCache(w, x, beam_size, max_length), theta, encoded
        )

    def CacheLetters(self) -> NestedMap:
        return self._each(lambda model: model.CacheLetters())

    def ExtendStep(
        self, theta: NestedMap, ids: tf.Tensor, cache: NestedMap, time: tf.Tensor, mask: tf.Tensor
    ) -> tuple[tf.Tensor, NestedMap]:
        """Logarithms of the mean probabilities, in place of logits; arguments and steps as of MtModel."""
        steps = self._each(
            lambda model, w, part: model.ExtendStep(w, ids, part, time, mask), theta, cache
        )
        log_probs = [tf.nn.log_softmax(tf.cast(logits, tf.float32)) for logits, _ in steps.values()]
        mean = tf.reduce_logsumexp(tf.stack(log_probs), 0) - math.log(len(log_probs))
        return mean, NestedMap(cache, **{name: part for name, (_, part) in steps.items()})

    def _each(self, fn: Any, *maps: NestedMap) -> NestedMap:
        return NestedMap({n: fn(m, *(one[n] for one in maps)) for n, m in self._models.items()})


def load_ensemble(
    runs: Sequence[tuple[str | os.PathLike, Chosen]],
    options: TranslateOptions | None = None,
    trust_run: bool = False,
) -> tuple[Translator, dict[str, Any]]:
    """The models of several runs as one; arguments as of load_translator.

    Returns:
        The translator, and what it is: that of the first run, with `members`, a list of what each of them is.

    Raises ValueError: their vocabularies or languages differ.
    """
    loaded = [read_parts(logdir, chosen, trust_run) for logdir, chosen in runs]
    about = [{"logdir": str(logdir), **one} for (logdir, _), (_, one) in zip(runs, loaded)]
    models, thetas, vocabs, languages = zip(*(parts for parts, _ in loaded), strict=True)
    pieces = [(one.source, one.target) for one in vocabs]  # lines are tidied as for the first model
    for what, values in (("vocabularies", pieces), ("languages", languages)):
        if other := next((i for i, one in enumerate(values) if one != values[0]), 0):
            raise ValueError(
                f"--logdir: {runs[other][0]} has other {what} than {runs[0][0]}; models of an ensemble share them: "
                "train them on the same data, or with the same input.vocab_dir"
            )
    theta = NestedMap({f"m{i}": one for i, one in enumerate(thetas)})
    weights = options.weights if options else "float32"
    translator = Translator(Ensemble(models), theta, vocabs[0], options, languages[0])
    return translator, {**about[0], "weights": weights, "members": about}
