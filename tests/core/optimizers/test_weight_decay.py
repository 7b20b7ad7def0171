"""The variables that decay, and the decoupled decay beside each optimizer's update."""

import numpy as np
import pytest
import tensorflow as tf
from refusals import refuses
from slots import init_slots

from lingvo_moe.core import kernels
from lingvo_moe.core.base_layer import BaseLayer, VariableSpec, WeightParams
from lingvo_moe.core.config import registry
from lingvo_moe.core.config.hyperparams import ParamError
from lingvo_moe.core.initializers import WeightInit
from lingvo_moe.core.kernels import tensorflow, xla
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.optimizers.adafactor import Adafactor
from lingvo_moe.core.optimizers.adam import AdamW
from lingvo_moe.core.optimizers.schedules import Constant
from lingvo_moe.core.optimizers.sgd import Sgd
from lingvo_moe.core.optimizers.weight_decay import decays
from lingvo_moe.core.randomness import make_seed

RATE = Constant.Params().Set(value=0.25)


def _spec(path, letters, dtype="float32", **fields):
    shape = tuple(range(8, 8 + len(letters)))
    init, split = WeightInit.Gaussian(), (None,) * len(letters)
    return VariableSpec(path, shape, dtype, letters, init, split, **fields)


SPECS = NestedMap(
    ffn=NestedMap(
        wi=_spec("m.ffn.wi", "MH").Stacked(2),
        bias=_spec("m.ffn.bias", "H").Stacked(2),
        experts=_spec("m.ffn.experts.wi", "EMH").Stacked(2),
        expert_bias=_spec("m.ffn.experts.bias", "EH"),
    ),
    norm=_spec("m.norm.scale", "M"),
    table=_spec("m.embedding.table", "VM"),
    task=_spec("m.router.task_emb", "UM"),
    router=_spec("m.router.wg", "ME"),
    head=_spec("m.head.w", "MV"),
    head_bias=_spec("m.head.b", "V"),
    moving=_spec("m.moving.mean", "MH", trainable=False),
)
MATRICES = {"m.ffn.wi", "m.ffn.experts.wi", "m.router.wg", "m.head.w"}


def _decaying(**params):
    p = AdamW.Params().Set(**{"weight_decay": 0.5, **params})
    return {path for path, does in decays(SPECS, p).items() if does}


def test_matrices_decay_and_vectors_and_embeddings_do_not():
    assert _decaying() == MATRICES
    assert _decaying(weight_decay=0.0) == set()


# The last names of all variables of the registered experiments and of the choices below.
DECAYED, NOT_DECAYED = (
    set(names.split())
    for names in (
        "q k v o w wi wi_gate wo wg wnoise down q_down of_hidden of_token",
        "b bias scale norm q_norm k_norm sinks logit_bias q_bias k_bias v_bias o_bias wi_bias wi_gate_bias wo_bias "
        "table task_emb",
    )
)
ROUTER = "task.moe.router"
CHOICES = (
    ("mt.M4Tiny", f"{ROUTER}=noisy_top_k;{ROUTER}.level=task;{ROUTER}.num_tasks=3"),
    (
        "lm.Tiny",
        "task.attention=extended;task.attention.biases=True;task.attention.qk_norm=projection;"
        "task.attention.sinks=True;task.multi_token_weight=0.1",
    ),
)


@pytest.mark.parametrize("repeat", [True, False])
def test_each_variable_of_each_experiment_decays_by_a_list_of_names(repeat):
    names = set()
    models = [(name, "") for name in registry.AllNames()] if repeat else []
    for model, override in (*models, *((name, f"{o};task.repeat={repeat}") for name, o in CHOICES)):
        specs = registry.GetParams(model, override).task.Instantiate().VariableSpecs()
        parts = [p for s in specs.Flatten() for p in ([x for row in s.packs for x in row] or [s])]
        for path, does in decays(NestedMap(parts=parts), AdamW.Params()).items():
            names.add(last := path.rpartition(".")[2])
            assert (last in DECAYED, last in NOT_DECAYED) == (does, not does), (model, path)
    if repeat:
        assert names == DECAYED | NOT_DECAYED


class _Scaled(BaseLayer):
    """A layer of a user, whose scale and bias have a number for each head and each of its numbers."""

    def __init__(self, params):
        super().__init__(params)
        one = WeightInit.Constant(1.0)
        self.CreateVariable("w", WeightParams((8, 2, 4), "MNK", WeightInit.FanIn(8)))
        self.CreateVariable("gain", WeightParams((2, 4), "NK", one, is_vector=True))
        self.CreateVariable("mixing", WeightParams((2, 4), "NK", one))


def test_a_layer_of_a_user_says_what_is_a_scale():
    specs = _Scaled.Params().Set(name="own").Instantiate().VariableSpecs()
    for tree in (specs, specs.Transform(lambda spec: spec.Stacked(3))):
        assert decays(tree, AdamW.Params()) == {
            "own.w": True,
            "own.gain": False,
            "own.mixing": True,
        }
        assert decays(tree, AdamW.Params().Set(decay_min_dims=1))["own.gain"]
        slots = Adafactor.Params().Set(min_dim_size_to_factor=2).Instantiate().SlotSpecs(tree)
        assert [sorted(slots[name]) for name in ("w", "gain", "mixing")] == [
            ["col", "row"],
            ["full"],
            ["col", "row"],
        ]


def test_by_dimension():
    trained = {s.path for s in SPECS.Flatten() if s.trainable}
    assert _decaying(decay_min_dims=1) == trained - {"m.embedding.table", "m.router.task_emb"}
    assert _decaying(decay_min_dims=3) == set()


def test_by_name():
    assert _decaying(decay_include=["*embedding*", "*.scale"]) == MATRICES | {
        "m.embedding.table",
        "m.norm.scale",
    }
    assert _decaying(decay_exclude=["m.router.*", "*.head.?"]) == {"m.ffn.wi", "m.ffn.experts.wi"}
    only = {"decay_min_dims": 9, "decay_include": ["*.wi"]}
    assert _decaying(**only) == {"m.ffn.wi", "m.ffn.experts.wi"}


@refuses(ParamError,
    ({"decay_include": ["*.tabel"]}, r"decay_include=.*matches no variable.*mean '\*\.table'"),
    ({"decay_exclude": ["m.norm"]}, r"decay_exclude=\['m.norm'\]: 'm.norm' matches no var"),
    ({"decay_exclude": ["*moving*"]}, "matches no variable that is trained"),
    ({"decay_include": ["*.wi"], "decay_exclude": ["*.wi"]},
     "decay_exclude=.* matches m.ffn.experts.wi, which decay_include=.* matches too"),
)  # fmt: skip
def test_patterns_that_cannot_be(params):
    AdamW.Params().Set(**params).Instantiate().SlotSpecs(SPECS)


@pytest.mark.parametrize("name, value", [("decay_min_dims", 1), ("decay_exclude", ["*.wg"])])
def test_a_mask_without_a_decay_is_refused(name, value):
    with pytest.raises(ParamError, match=f"{name}=.*: has no effect without a weight decay"):
        AdamW.Params().Set(weight_decay=0.0, **{name: value}).Instantiate()
    with pytest.raises(ParamError, match="must be a list of patterns"):
        AdamW.Params().Set(decay_include="*.wi")


@pytest.mark.parametrize("used", [xla, tensorflow], ids=["xla", "tensorflow"])
@pytest.mark.parametrize("cls", [Adafactor, AdamW])
def test_decoupled_decay_is_beside_the_update(cls, used):
    """new weight = the one without decay - rate * decay * old weight, and slots do not see it."""
    specs = NestedMap(w=_spec("w", "MH"), b=_spec("b", "H"))
    theta, grads = (specs.Transform(lambda s, i=i: s.Init(make_seed(i, 0))) for i in (1, 2))
    new = {}
    for decay in (0.0, 0.5):
        p = cls.Params().Set(learning_rate=RATE, weight_decay=decay)
        if cls is Adafactor:
            p.min_dim_size_to_factor = 8
        optimizer = p.Instantiate()
        slots = init_slots(optimizer, specs, make_seed(0, 0), theta)
        state = NestedMap(theta=theta, slots=slots, step=tf.constant(3))
        with kernels.using(used):
            new[decay] = optimizer.Update(state, grads, specs)
    (plain, slots, metrics), (decayed, slots_2, metrics_2) = new[0.0], new[0.5]
    np.testing.assert_allclose(decayed.w, plain.w - 0.25 * 0.5 * theta.w, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(decayed.b, plain.b)
    for a, b in zip((slots, metrics), (slots_2, metrics_2), strict=True):
        for x, y in a.Zip(b):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("cls", [Adafactor, AdamW, Sgd])
def test_slow_variables_move_as_at_a_lower_rate(cls):
    specs = NestedMap(w=_spec("m.w", "MH"), wg=_spec("m.router.wg", "ME"))
    theta, grads = (specs.Transform(lambda s, i=i: s.Init(make_seed(i, 0))) for i in (1, 2))

    def updated(rate, **params):
        p = cls.Params().Set(learning_rate=Constant.Params().Set(value=rate), **params)
        p.weight_decay = 0.5
        optimizer = p.Instantiate()
        slots = init_slots(optimizer, specs, make_seed(0, 0), theta)
        state = NestedMap(theta=theta, slots=slots, step=tf.constant(3))
        return optimizer.Update(state, grads, specs)[0]

    slow = updated(0.25, slow=["*.router.*"], slow_share=0.5)
    np.testing.assert_array_equal(slow.w, updated(0.25).w)
    np.testing.assert_array_equal(slow.wg, updated(0.125).wg)


def test_slow_variables_that_cannot_be():
    refused = r"^slow=\['\*\.wgg'\]: .*matches no variable.*did you mean '\*\.wg'"
    with pytest.raises(ParamError, match=refused):
        AdamW.Params().Set(slow=["*.wgg"]).Instantiate().SlotSpecs(SPECS)
    with pytest.raises(
        registry.RegistryError, match=r"slow_share=0.2: has no effect with .*slow=\[\]"
    ):
        registry.GetParams("mt.M4Tiny", "task.optimizer.slow_share=0.2")


def test_a_small_decay_of_a_bfloat16_weight_is_rounded_once():
    specs = NestedMap(w=_spec("w", "MH", "bfloat16"))
    theta = specs.Transform(lambda s: s.Init(make_seed(1, 0)))
    grads = theta.Transform(lambda w: tf.ones(w.shape, tf.bfloat16))
    optimizer = AdamW.Params().Set(learning_rate=RATE, weight_decay=0.1).Instantiate()
    slots = init_slots(optimizer, specs, make_seed(0, 0), theta)
    state = NestedMap(theta=theta, slots=slots, step=tf.constant(0))
    new, _, _ = optimizer.Update(state, grads, specs)
    wide = tf.cast(theta.w, tf.float32)
    want = tf.cast(wide - 0.25 - 0.025 * wide, tf.bfloat16)
    np.testing.assert_allclose(tf.cast(new.w, tf.float32), tf.cast(want, tf.float32), rtol=1e-2)
    assert new.w.dtype == tf.bfloat16
