"""FastDecoder's search equals the plain one, bit-identically for each row among any others, also with custom layers.

Letters: B row, S source token, T target token, J hypothesis.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from searches import Lines, make_model, make_theta, source, task_params

from lingvo_moe.core.decode.flat_beam_search import SearchOptions
from lingvo_moe.core.kernels.weights import Packed
from lingvo_moe.core.layers.attention import MultiHeadAttention
from lingvo_moe.core.layers.feed_forward import FeedForward
from lingvo_moe.core.layers.normalization import RmsNorm
from lingvo_moe.core.layers.positions import Rotary
from lingvo_moe.core.layers.transformer_layer import TransformerLayer
from lingvo_moe.core.moe.experts import Experts
from lingvo_moe.core.moe.layer import MoELayer
from lingvo_moe.core.moe.routers.top_k import TopKRouter
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import single_device, use_mesh
from lingvo_moe.tasks.mt.decode_step import Decoder
from lingvo_moe.tasks.mt.decoding.fast_decoder import FastDecoder
from lingvo_moe.tasks.mt.mt_model import MtModel
from lingvo_moe.tasks.text.decoding.saved_weights import PackedWeights
from lingvo_moe.tasks.transformer import stacks

pytestmark = pytest.mark.slow

V, LONGEST = 700, 36  # more than two blocks of steps
SIZES = {"num_encoder_layers": 2, "num_decoder_layers": 2, "num_experts": 4}
DENSE = {"num_encoder_layers": 1, "num_decoder_layers": 1, "num_experts": 0}
LENGTHS = [3, 47, 16, 1, 30, 31, 17, 5, 64, 12]


class Searcher:
    """A model and searches with it."""

    def __init__(self, beam_size: int, **sizes: Any):
        # A single row of products so wide rounds differently.
        self.model, self.theta = make_model(V, hidden_dim=2048, num_kv_heads=1, **sizes)
        options = SearchOptions(beam_size, min(2, beam_size))
        self.decoder = Decoder(self.model, options, LONGEST, V - 7)
        fast = PackedWeights(self.model, self.theta)
        self.fast_decoder = FastDecoder(fast, options, LONGEST, V - 7)
        kinds = [tf.TensorSpec([None, None], tf.int32), tf.TensorSpec([None], tf.int32)]
        self.traces = 0
        self.fast = tf.function(self._Fast, input_signature=kinds, autograph=False)
        self.plain = tf.function(self._Plain, autograph=False)
        self.lines = Lines(LENGTHS, V)

    def _Fast(self, ids: tf.Tensor, lengths: tf.Tensor) -> NestedMap:
        self.traces += 1
        return self.fast_decoder.Find(*source(ids, lengths, LONGEST))

    def _Plain(self, ids: tf.Tensor, lengths: tf.Tensor) -> NestedMap:
        with use_mesh(single_device()):
            return self.decoder.Search(self.theta, *source(ids, lengths, LONGEST))


@pytest.fixture(scope="module", params=[2, 1], ids=["modern", "dense_greedy"])
def searcher(request) -> Searcher:
    if request.param == 1:
        return Searcher(beam_size=1, **DENSE)
    moe = MoELayer.Params().Set(num_shared_experts=1)
    moe.router = TopKRouter.Params().Set(k=2, gate="sigmoid")
    modern = {"activation": "swiglu", "norm": RmsNorm.Params(), "position": Rotary.Params()}
    return Searcher(beam_size=2, moe=moe, **SIZES, **modern)


@pytest.fixture(scope="module")
def together(searcher) -> NestedMap:
    rows = [*range(len(LENGTHS)), None]
    return searcher.fast(*searcher.lines.Rows(rows, 64)).Transform(lambda x: x.numpy())


def test_it_finds_what_the_plain_search_finds(searcher, together):
    want = searcher.plain(*searcher.lines.Rows([*range(len(LENGTHS)), None], 64))
    steps = together.ids_BKT.shape[2]
    np.testing.assert_array_equal(together.ids_BKT, want.ids_BKT[:, :, :steps])
    np.testing.assert_array_equal(together.lengths_BK, want.lengths_BK)
    np.testing.assert_allclose(together.scores_BK, want.scores_BK, rtol=1e-5)
    assert (together.lengths_BK[-1] == 0).all()
    assert (together.ids_BKT < V - 7).all()
    assert not np.isin(together.ids_BKT, [1, 3]).any()
    assert len(set(together.lengths_BK[:, 0].tolist())) > 4  # rows leave at different blocks


def test_a_row_is_bit_identical_alone_and_with_others(searcher, together):
    """Other rows, another number of rows or another padded length leave tokens and scores equal."""
    more = [([2, 0, 1], 48), ([9, 8, 7, 6, 5], 64), ([3, None, 0, None], 32)]
    searcher.lines.CheckAlone(searcher.fast, together, more)
    assert searcher.traces == 1


# --- custom layers


class TwoFeedForwards(FeedForward):
    def FProp(self, theta, x, paddings, seed=None, context=None):
        y, extras = super().FProp(theta, x, paddings)
        return y + 0.1 * tf.einsum("BTM,MH,HM->BTM", x, theta.wi, theta.wo), extras


class SharperAttention(MultiHeadAttention):
    def __init__(self, params):
        super().__init__(params)
        self._scale *= 3


class DoubledExperts(Experts):
    def GroupedFProp(self, theta, x, seed=None):
        y = super().GroupedFProp(theta, x, seed)
        return y.With(2 * y.values)


class HalvedMoELayer(MoELayer):
    def FProp(self, *args, **kwargs):
        y, extras = super().FProp(*args, **kwargs)
        return 0.5 * y, extras


class ReversedRouter(TopKRouter):
    """Chooses the experts with the smallest gates."""

    def ChooseByLogits(self, logits_GSE, *args, **kwargs):
        return super().ChooseByLogits(-logits_GSE, *args, **kwargs)


class ShortcutLayer(TransformerLayer):
    """A layer whose feed-forward reads the input of the attention."""

    def FProp(self, theta, x, aux, seed=None):
        y, extras = super().FProp(theta, x, aux)
        return y + self.ffn.FProp(theta.ffn, x, aux.paddings)[0], extras

    def ExtendStep(self, theta, x, cache, time, aux, memory):
        y, cache = super().ExtendStep(theta, x, cache, time, aux, memory)
        return y + self.ffn.FProp(theta.ffn, x, aux.paddings)[0], cache


class OtherWayModel(MtModel):
    def ExtendStep(self, *args):
        logits, cache = super().ExtendStep(*args)
        return -logits, cache


def _attention(p):
    p.self_atten_tpl.cls = SharperAttention
    if p.cross_atten_tpl:
        p.cross_atten_tpl.cls = SharperAttention


def _ffn(p):
    if p.ffn_tpl.cls is FeedForward:
        p.ffn_tpl.cls = TwoFeedForwards


def _layer(p):
    p.cls = ShortcutLayer


def _of_moe(change):
    return lambda p: change(p.ffn_tpl) if p.ffn_tpl.cls is MoELayer else None


ALL = {"self_atten", "cross_atten", "ffn", "experts", "target_embedding"}
# A change to the Params, and the parts whose weights must stay as they are then.
PARTS = {
    "attention": (_attention, set()),
    "ffn": (_ffn, {"ffn"}),
    "experts": (_of_moe(lambda moe: moe.experts.Set(cls=DoubledExperts)), {"experts"}),
    "moe": (_of_moe(lambda moe: moe.Set(cls=HalvedMoELayer)), {"experts"}),
    "router": (_of_moe(lambda moe: moe.Set(router=ReversedRouter.Params())), set()),
    "dispatcher": (_of_moe(lambda moe: moe.Set(inference_dispatcher="index")), {"experts"}),
    "layer": (_layer, {"self_atten", "cross_atten", "ffn", "experts"}),
    "model": (lambda p: None, ALL),
}


def _packed(model: MtModel, theta: NestedMap) -> set[str]:
    """The parts of a model of which some weights are packed."""
    weights = PackedWeights(model, theta).Theta()
    items = weights.FlattenItems()
    paths = [path.replace("[", ".").split(".") for path, leaf in items if isinstance(leaf, Packed)]
    return {next(part for part in reversed(path) if part in ALL) for path in paths}


def _own(monkeypatch, encoder: Sequence[str], decoder: Sequence[str], sizes: dict) -> Any:
    """A model with these custom parts in its stacks."""
    plain = stacks.layer_params

    def layer(model_params, stack, number):
        p = plain(model_params, stack, number)
        for part in decoder if stack.causal else encoder:
            PARTS[part][0](p)
        return p

    monkeypatch.setattr(stacks, "layer_params", layer)
    cls = OtherWayModel if "model" in decoder else MtModel
    return task_params(V, cls=cls, hidden_dim=64, **sizes).Instantiate()


@pytest.fixture(scope="module")
def theta() -> NestedMap:
    """The weights of the model without custom parts, which are those of one with any."""
    return make_theta(task_params(V, hidden_dim=64, **SIZES).Instantiate())


@pytest.mark.parametrize("part", PARTS)
def test_weights_of_a_custom_layer_stay_as_they_are(part, theta, monkeypatch):
    """Unless it overrides nothing that reads them."""
    _, kept = PARTS[part]
    assert _packed(_own(monkeypatch, [part], [part], SIZES), theta) == ALL - kept


# Each part changes the values in a way of its own, so those of a group are traced once.
@pytest.mark.parametrize(("encoder", "decoder", "sizes"), [
    (["attention", "experts", "moe", "dispatcher"], ["attention", "ffn", "router"], SIZES),
    (["layer"], ["layer", "model"], DENSE),
], ids=["parts", "wholes"])  # fmt: skip
def test_a_layer_of_one_s_own_runs_as_it_is(encoder, decoder, sizes, monkeypatch):
    """It runs beside layers whose weights are packed, and the search grows the caches of both."""
    model = _own(monkeypatch, encoder, decoder, sizes)
    theta = make_theta(model)
    fast = PackedWeights(model, theta)
    options = SearchOptions(2, 1)
    lines = Lines([3, 24, 28, 12], V)
    ids, lengths = (tf.constant(x) for x in lines.Rows([0, 1, 2, 3], 32))

    @tf.function(autograph=False)
    def search(ids, lengths):
        return FastDecoder(fast, options, 28, V).Find(*source(ids, lengths, 28))

    @tf.function(autograph=False)
    def plain(ids, lengths):
        with use_mesh(single_device()):
            return Decoder(model, options, 28, V).Search(theta, *source(ids, lengths, 28))

    got, want = search(ids, lengths), plain(ids, lengths)
    steps = got.ids_BKT.shape[2]
    np.testing.assert_array_equal(got.ids_BKT, want.ids_BKT[:, :, :steps])
    np.testing.assert_allclose(got.scores_BK, want.scores_BK, rtol=1e-4)
    assert got.lengths_BK.numpy().max() > 16  # caches grew


def test_what_another_model_cannot_have_is_refused():
    model, theta = make_model(V, cls=OtherWayModel, hidden_dim=64, **DENSE)
    with pytest.raises(ValueError, match="weights=int8: OtherWayModel packs none"):
        PackedWeights(model, theta, "int8")
    fast = PackedWeights(model, theta)
    with pytest.raises(ValueError, match=r"a shortlist is for models that pack .*; OtherWayModel"):
        FastDecoder(fast, SearchOptions(2, 1), 28, V, shortlist=object())
