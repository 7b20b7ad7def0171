"""Parameters and inputs of the MoE layer and its routers that are refused: what is set, and a part of the message."""

from dataclasses import replace

import tensorflow as tf
from refusals import refuses
from router_testing import route, router

from lingvo_moe.core.moe.dispatch_dropless import DroplessDispatcher
from lingvo_moe.core.moe.experts import BaseExperts
from lingvo_moe.core.moe.layer import ROUTERS, MoELayer
from lingvo_moe.core.moe.routers.base import LearnedRouter
from lingvo_moe.core.moe.routers.losses_and_metrics import Choice
from lingvo_moe.core.moe.routers.slots import top_k
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import single_device, use_mesh


class SlotExperts(BaseExperts):
    """Experts without rows."""


def _layer(**params):
    sizes = {"model_dim": 4, "hidden_dim": 4, "num_experts": 6}
    return MoELayer.Params().Set(name="moe", **sizes).Set(**params).Instantiate()


@refuses(ValueError,
    ("top2", {"reading": "papr"}, "did you mean 'paper'"),
    ("top2", {"second_expert_policy": "some"}, "must be one of random, sampling, all"),
    ("top2", {"normalize_gates": "never"}, "before_drops, after_drops"),
    ("top2", {"num_experts": 1}, "two experts or more"),
    ("top2", {"level": "sentance"}, "did you mean 'sentence'"),
    ("top2", {"level": "task"}, "num_tasks=0: level 'task' needs the number of tasks"),
    ("top2", {"level": "id"}, "vocab_size=0: level 'id' needs the size of the vocabulary"),
    ("top_k", {"softmax_order": "befor"}, "did you mean 'before'"),
    ("top_k", {"normalize_gates": "always"}, "one of never, before_drops, after_drops, or None"),
    ("top_k", {"k": 7}, "k=7: must be between 1 and the 6 experts"),
    ("top_k", {"k": 1, "normalize_gates": "before_drops"}, "make every gate 1, which trains"),
    ("expert_choice", {"inference_k": 7}, "router.inference_k=7"),
    ("hash", {"table": "modula"}, "did you mean 'modular'"),
    ("hash", {}, "vocab_size=0: a by_layer table needs"),
    ("hash", {"table": "modular", "k": 7}, "k=7: must be between 1 and the 6 experts"),
    ("lsh", {"hash": "planes"}, "did you mean 'hyperplanes'"),
    ("lsh", {"hash": "hyperplanes"}, "2^n experts, not 6"),
    ("lsh", {"hash": "hyperplanes", "num_experts": 4, "k": 4}, "2 bits to flip, so k is at most 3"),
    ("lsh", {"num_experts": 5}, "even number of corners, not 5"),
    ("moe", {"dispatcher": "einsun"}, "did you mean 'einsum'"),
    ("moe", {"num_experts": 1}, "two experts or more"),
    ("moe", {"inference_dispatcher": DroplessDispatcher.Params().Set(device_capacity_factor=2.0)},
     "device_capacity_factor=2.0: must be 0"),
    ("moe", {"dispatcher": "dropless", "experts": SlotExperts.Params()}, "SlotExperts has no GroupedFProp"),
    plain=True,
)  # fmt: skip
def test_parameters(name, params):
    if name == "moe":
        _layer(**params)
    else:
        router(name, **{"model_dim": 4, "num_experts": 6, **params})


SEGMENTS = {"segment_ids": tf.ones([2, 6], tf.int32)}
SENTENCES = {"router": ROUTERS["top2"].Params().Set(level="sentence")}
MODULAR = {"router": ROUTERS["hash"].Params().Set(table="modular")}


@refuses(ValueError,
    ({"num_groups": 5}, None, "num_groups=5: 2 x 6 = 12 tokens"),
    ({**SENTENCES, "num_groups": 4}, SEGMENTS, "4 groups of 3 tokens split rows of 6: num_groups must"),
    (SENTENCES, None, "moe routes by segment_ids"),
    (MODULAR, None, "moe routes by ids"),
    plain=True,
)  # fmt: skip
def test_inputs(params, context):
    layer = _layer(**params)
    context = None if context is None else NestedMap(context)
    x, paddings = tf.zeros([2, 6, 4]), tf.zeros([2, 6])
    with use_mesh(single_device()):
        theta = layer.InitTheta(make_seed(1, 0))
        layer.FProp(theta, x, paddings, seed=make_seed(3, 4), context=context)


class MyRouter(LearnedRouter):
    """Each token's two likeliest experts, and what `edited` makes of the Choice."""

    def ChooseByLogits(self, logits_GSE, real_GS, capacity=None, seed=None):
        gate_GSk, index_GSk = top_k(tf.sigmoid(logits_GSE), 2)
        return self.edited(Choice(index_GSk, gate_GSk, tf.stack([real_GS] * 2, -1), real_GS))


@refuses(ValueError,
    (lambda c: (c.expert_index, c.gate), "MyRouter chose with a tuple; it has to return a Choice"),
    (lambda c: replace(c, gate=c.gate[..., :1]),
     "MyRouter returned a Choice whose gate is float32 (1, 3, 1); it has to be float32 [G,S,k], where expert_index is "
     "(1, 3, 2)"),
    (lambda c: replace(c, gate=tf.cast(c.gate, tf.bfloat16)), "gate is bfloat16 (1, 3, 2); it has to be float32"),
    (lambda c: replace(c, expert_index=c.gate), "expert_index is float32 (1, 3, 2); it has to be int32"),
    (lambda c: replace(c, expert_index=c.expert_index[0]), "expert_index is int32 (3, 2); it has to be int32 [G,S,k]"),
    (lambda c: replace(c, wanted=c.real), "wanted is float32 (1, 3); it has to be float32 [G,S,k]"),
    plain=True,
)  # fmt: skip
def test_what_a_router_returns(edit):
    params = MyRouter.Params().Set(name="router", model_dim=4, num_experts=6)
    layer = params.Instantiate()
    layer.edited = edit
    route(layer, tf.ones([1, 3, 4]), tf.zeros([1, 3]), 2)
