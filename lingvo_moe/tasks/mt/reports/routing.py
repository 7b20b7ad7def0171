"""Counts by language which experts a trained model's MoE layers choose for held-out sentences.

Letters: B row of the batch, T time, U language, L layer, E expert.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lingvo_moe.core.engine.checkpoints.run_weights import NEWEST, Chosen
from lingvo_moe.core.engine.loop.summaries import read_metrics
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.engine.tf_engine import TfGraphEngine
from lingvo_moe.core.moe.expert_loads import load_figures
from lingvo_moe.core.moe.routers.losses_and_metrics import noting_choices
from lingvo_moe.core.nested_map import NestedMap, map_structure
from lingvo_moe.core.task.base_task import BaseTask
from lingvo_moe.tasks.mt.mt_model import MtModel
from lingvo_moe.tasks.mt.reports.expert_tables import ExpertTables
from lingvo_moe.tasks.text.batches.held_out_batches import encoded, held_out_batches
from lingvo_moe.tasks.text.batches.rows_of_pairs import Shape
from lingvo_moe.tasks.text.data.dev_set import DevSet
from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.runs.artifacts import task_numbers
from lingvo_moe.tasks.text.runs.run_dir import TextRunDir
from lingvo_moe.tasks.text.runs.weights import load_theta

_STACKS = {"encoder": "src", "decoder": "tgt"}  # and the side of a batch whose tokens it routes
# (languages that are done, all languages).
Progress = Callable[[int, int], None]


@dataclass
class LayerRouting:
    """The choices of one MoE layer."""

    name: str  # e.g. 'encoder/layer_1'
    router: str  # the router's class, e.g. 'Top2Router'
    tokens_U: np.ndarray  # int64, the tokens of each language
    chosen_UE: np.ndarray  # int64, how many of them went to each expert, all choices together
    unrouted_U: np.ndarray  # int64, tokens that no expert saw
    # int64, as chosen_UE, of first choices; None where choices have no order
    first_UE: np.ndarray | None = None
    # float64, the sum of the gating network's probabilities; None without one
    probability_UE: np.ndarray | None = None
    # float64, the sum of the entropies of these, in nats; None without them
    entropy_U: np.ndarray | None = None
    # From the run's own summaries, means over the last tenth of them, by metric.
    training: dict[str, float] = field(default_factory=dict)

    @property
    def load_E(self) -> np.ndarray:
        """Each expert's share of all choices."""
        return self.chosen_UE.sum(0) / max(self.chosen_UE.sum(), 1)

    @property
    def dead_experts(self) -> int:
        """Experts that no token was sent to."""
        return int((self.chosen_UE.sum(0) == 0).sum())

    @property
    def gate_entropy(self) -> float | None:
        """The mean over all tokens, in nats."""
        return None if self.entropy_U is None else float(self.entropy_U.sum() / self.tokens_U.sum())

    @property
    def language_bits(self) -> float:
        """The mutual information of a token's expert and its language: see `mutual_information`."""
        return mutual_information(self.chosen_UE if self.first_UE is None else self.first_UE)

    def ToDict(self, languages: Sequence[str]) -> dict[str, Any]:
        """The layer's figures for JSON."""

        def by_language(values: np.ndarray | None) -> dict[str, Any] | None:
            return None if values is None else dict(zip(languages, values.tolist(), strict=True))

        return {
            "name": self.name,
            "router": self.router,
            "tokens": by_language(self.tokens_U),
            "chosen": by_language(self.chosen_UE),
            "first": by_language(self.first_UE),
            "unrouted": by_language(self.unrouted_U),
            "probability": by_language(self.probability_UE),
            "entropy": by_language(self.entropy_U),
            **{
                f"{name}_by_language": by_language(x)
                for name, x in load_figures(self.chosen_UE).items()
            },
            "load": self.load_E.tolist(),
            "dead_experts": self.dead_experts,
            "gate_entropy": self.gate_entropy,
            "language_bits": self.language_bits,
            "training": self.training,
        }


@dataclass
class RoutingReport:
    """The choices of all MoE layers."""

    about: dict[str, Any]  # model, params_override and step of the checkpoint, and num_experts
    pairs: dict[str, int]  # how many held-out pairs of each language were looked at
    layers: list[LayerRouting]  # the layers in the order of the model
    # By stack, where they were asked for: its tables of experts by token id, int32 [L,V].
    tables: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def languages(self) -> list[str]:
        """The languages, in the order of the layers' U."""
        return list(self.pairs)

    def ToDict(self) -> dict[str, Any]:
        """The report's fields for JSON."""
        layers = [layer.ToDict(self.languages) for layer in self.layers]
        return {**self.about, "pairs": self.pairs, "layers": layers}


def mutual_information(count_UE: np.ndarray) -> float:
    """The information between a token's language and its expert, in bits; every language weighs the same.

    0 where all languages use the experts alike, at most log2 of the smaller number of the two. Few
    tokens look more orderly than they are; Miller and Madow's term, (kinds seen - 1) / (2 tokens),
    is added to each entropy for that.
    """
    count_UE = count_UE[count_UE.sum(1) > 0]
    if not len(count_UE):
        return 0.0
    tokens_U = count_UE.sum(1)
    share_UE = count_UE / tokens_U[:, np.newaxis]
    within = np.mean([_entropy(p) + _missing(p, n) for p, n in zip(share_UE, tokens_U)])
    mean_E = share_UE.mean(0)
    overall = _entropy(mean_E) + _missing(mean_E, tokens_U.sum())
    return float(np.clip((overall - within) / np.log(2), 0.0, np.log2(min(count_UE.shape))))


def _entropy(share_E: np.ndarray) -> float:
    some = share_E[share_E > 0]
    return float(-(some * np.log(some)).sum())


def _missing(share_E: np.ndarray, tokens: int) -> float:
    return float(((share_E > 0).sum() - 1) / (2 * tokens))


def measure_routing(
    run: TextRunDir,
    devset: DevSet,
    chosen: Chosen = NEWEST,
    rows: int = 16,
    progress: Progress = lambda done, all_: None,
    with_tables: bool = False,
) -> RoutingReport:
    """Runs a run's model over held-out pairs, as in inference: nothing is dropped, nothing by chance.

    The decoder is given the true translation. Each batch holds one language, so that what a layer
    reports of a batch are counts of that language. A pair that is longer than the run's rows is cut.

    Args:
        rows: B.
        with_tables: whether the report has `tables`, whose counts take 8 L V E bytes.

    Raises:
        RunDirError: no run there.
        CheckpointError: no such checkpoint, or a damaged one.
        DataError: a language without a usable pair.
        ValueError: a model without experts.
    """
    params, task = run.Params(), run.Task(MtModel)
    if not task.Metrics().Layers():
        raise ValueError(
            f"--logdir={run.path}: {run.experiment['model']} has no MoE layer (task.num_experts=0), so "
            "nothing is routed"
        )
    vocabs = run.OpenVocabularies()
    inputs = params.input.Copy().Set(batch_size=rows, pack=True).Instantiate()
    theta, about = load_theta(run, task, chosen)
    batch_specs = inputs.BatchSpec().Transform(lambda spec: TensorSpec(spec.shape, spec.dtype))
    metrics_of = _moe_metrics(task, theta, batch_specs)
    by_language = []
    pairs: dict[str, int] = {}
    sizes = {"encoder": task.p.source_vocab_size, "decoder": task.p.target_vocab_size}
    tables = ExpertTables(_STACKS, sizes)
    tasks = [0] * len(devset.languages)
    if inputs.shape.task_ids:
        tasks = task_numbers(devset.languages, run.languages)
    for (lang, lines), task_id in zip(devset.items(), tasks, strict=True):
        counts = []
        for batch in _batches(lines, task_id, vocabs, inputs.shape):
            metrics = metrics_of(batch)
            counts.append(_counts(batch, metrics))
            if with_tables:
                tables.Add(batch, metrics)
            segments = batch.tgt.segment_ids.max(axis=1)  # those of a row are its pairs
            pairs[lang] = pairs.get(lang, 0) + int(segments.sum())
        if not counts:
            raise DataError(f"the held-out pairs of {lang!r} have no tokens")
        by_language.append(map_structure(lambda *x: sum(x), *counts))
        progress(len(by_language), len(devset.languages))
    about["num_experts"] = task.p.num_experts
    counts_LU = map_structure(lambda *x: np.stack(x, 1), *by_language)
    return RoutingReport(about, pairs, _layers(task, counts_LU, run), tables.Tables())


def _moe_metrics(
    task: BaseTask, theta: NestedMap, batch_specs: NestedMap
) -> Callable[[NestedMap], NestedMap]:
    """A function from a batch to the metrics of the MoE layers, as arrays."""
    engine = TfGraphEngine()  # a few batches are not worth a compilation
    specs = task.VariableSpecs(), batch_specs

    def moe_metrics(theta: NestedMap, batch: NestedMap) -> NestedMap:
        with noting_choices():
            return task.EvalStep(theta, batch).moe

    evaluate = engine.Build(moe_metrics, specs, name="routing")
    theta = engine.Put(theta, specs[0])
    return lambda batch: engine.Get(evaluate(theta, batch))


def _batches(
    lines: Sequence[tuple[str, str]], task_id: int, vocabs: NestedMap, shape: Shape
) -> Iterator[NestedMap]:
    """Each pair once, packed."""
    encode = vocabs.source.Encode, vocabs.target.Encode
    sized = encoded(encode, shape, truncate=True)
    for held_out in held_out_batches({"": [(lines, (task_id,))]}, sized, shape):
        yield held_out.batch


def _counts(batch: NestedMap, moe: NestedMap) -> NestedMap:
    """Returns what each stack's layers report of a batch of one language, by field of LayerRouting: [L] or [L,E].

    Metrics are shares of a batch's tokens or slots; times their number they are the counts again,
    to the unit.
    """
    out = NestedMap()
    for stack, side in _STACKS.items():
        m = moe[stack].Transform(lambda x: np.asarray(x, np.float64))
        tokens = float((batch[side].segment_ids > 0).sum())
        slots_L = np.rint(m.experts_per_token * tokens)
        counts = NestedMap(
            tokens_U=np.full_like(slots_L, tokens),
            chosen_UE=m.expert_load * slots_L[:, np.newaxis],
            unrouted_U=m.dispatch_0 * tokens,
        )
        if "expert_load_first" in m:
            counts.first_UE = m.expert_load_first * tokens
        out[stack] = counts.Transform(lambda x: np.rint(x).astype(np.int64))
        if "importance" in m:
            out[stack].probability_UE = m.importance * tokens
            out[stack].entropy_U = m.gate_entropy * tokens
    return out


def _layers(task: BaseTask, counts: NestedMap, run: TextRunDir) -> list[LayerRouting]:
    """The layers of a model, from the counts of each stack: [L,U] or [L,U,E]."""
    rows = read_metrics(str(run.summaries_dir))
    rows = rows[-max(len(rows) // 10, 1) :]
    out = []
    for prefix, names in task.Metrics().Layers().items():
        stack = prefix.rpartition("/")[2]
        router = task.children[stack].p.block[-1].ffn_tpl.router.cls.__name__
        for i, name in enumerate(names):
            training = _of_training(rows, prefix, i)
            of_layer = {field: of_layers[i] for field, of_layers in counts[stack].items()}
            out.append(LayerRouting(f"{stack}/{name}", router, **of_layer, training=training))
    return out


def _of_training(rows: Sequence[dict[str, Any]], prefix: str, layer: int) -> dict[str, float]:
    """Means over these summaries of every metric that is one number for each layer."""
    out = {}
    for path in rows[-1] if rows else ():
        if path.startswith(f"{prefix}/") and not isinstance(rows[-1][path][layer], list):
            values = [row[path][layer] for row in rows if path in row]
            finite = [v for v in values if v is not None]
            if finite:
                out[path.removeprefix(f"{prefix}/")] = float(np.mean(finite))
    return out
