"""Ideas that docs/map.md gives a price: an activation, an optimizer and a form of files, each in this one file."""

import numpy as np
import tensorflow as tf

from lingvo_moe import api
from lingvo_moe.core import kernels
from lingvo_moe.core.kernels import Activation
from lingvo_moe.core.layers import feed_forward
from lingvo_moe.core.optimizers.base_optimizer import slot_spec
from lingvo_moe.core.sharding import single_device, use_mesh
from lingvo_moe.params.mt.demo import M4Tiny
from lingvo_moe.tasks.text.preparing import formats
from lingvo_moe.tasks.text.preparing.lines import Fields, pair
from lingvo_moe.tasks.text.preparing.source_files import find_sources
from tools.import_graph import ROOT


def test_squared_relu(monkeypatch):
    squared = Activation(lambda x: tf.nn.relu(x) ** 2, 2)
    monkeypatch.setitem(feed_forward.ACTIVATIONS, "squared_relu", squared)
    p = feed_forward.FeedForward.Params().Set(name="f", model_dim=3, hidden_dim=5)
    layer = p.Set(activation="squared_relu").Instantiate()
    theta = layer.InitTheta(api.make_seed(0, 0))
    x = tf.random.stateless_normal([2, 4, 3], [1, 2])
    expected = np.maximum(np.matmul(x, theta.wi), 0) ** 2 @ theta.wo.numpy()
    with use_mesh(single_device()):
        y, _ = layer.FProp(theta, x, tf.zeros([2, 4]))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    model = api.GetParams("lm.Tiny", "task.activation=squared_relu").task.Instantiate()
    assert model.VariableSpecs()


class Lion(api.BaseOptimizer):
    """Chen et al. 2023, Symbolic Discovery of Optimization Algorithms, algorithm 2."""

    ELEMENTWISE = True

    def _SlotSpecs(self, spec):
        return api.NestedMap(momentum=slot_spec(spec, "momentum"))

    def _UpdateOne(self, spec, weight, grad, slot, numbers):
        step = tf.sign(0.9 * slot.momentum + 0.1 * grad)
        momentum = 0.99 * slot.momentum + 0.01 * grad
        return kernels.DenseDelta(numbers.rate * step), api.NestedMap(momentum=momentum)


def test_lion():
    override = "task.optimizer.cls=type/test_map/Lion;task.optimizer.learning_rate=constant"
    override += ";task.optimizer.learning_rate.value=0.5"
    task = api.GetParams("toy_task.Line", override).task.Instantiate()
    state = task.InitState(0)
    batch = api.NestedMap(x=tf.ones([16, 8]), y=tf.fill([16], 100.0))
    with use_mesh(single_device()):
        new, _ = task.TrainStep(state, batch)
    np.testing.assert_allclose(new.theta.w - state.theta.w, np.full(8, 0.5), rtol=1e-5)


def test_a_form_of_files(monkeypatch, tmp_path):
    def read(source, fields):
        del fields
        for number, line in enumerate(source.files[0].read_text().splitlines(), 1):
            yield pair(number, source.lang, *line.split("|"))

    monkeypatch.setitem(formats.FORMATS, "bars", formats.Format(read, ("bars",), mixed=False))
    (tmp_path / "de.bars").write_text("rot|red\nblau|blue\n")
    (source,) = find_sources([tmp_path], Fields()).train
    assert (source.form, source.lang) == ("bars", "de")
    lines = list(formats.read_source(source, Fields()))
    assert [(line.source, line.target) for line in lines] == [("rot", "red"), ("blau", "blue")]


class NllbMoe(M4Tiny):
    """The family of NLLB-MoE (Costa-jussa et al. 2022): experts in every fourth layer, biases, one table, ReLU."""

    def Task(self):
        p = super().Task().Set(moe_every=4, num_encoder_layers=8, num_decoder_layers=4)
        p.position.offset = 2
        vocabulary = p.target_vocab_size
        return p.Set(use_bias=True, shared_embedding=True, source_vocab_size=vocabulary)


def test_a_family_of_models():
    task = NllbMoe().Task().Set(name="nllb").Instantiate()
    specs = dict(task.VariableSpecs().FlattenItems())
    experts = {path.rpartition(".experts.")[0] for path in specs if ".experts." in path}
    assert experts == {f"{side}.blocks.body.layers[3].ffn" for side in ("encoder", "decoder")}
    assert specs["encoder.blocks.body.layers[3].ffn.experts.wi"].shape[0] == 2  # of 8 layers
    assert [path for path in specs if path.endswith("embedding.table")] == ["embedding.table"]
    projections = ("self_atten.q_bias", "cross_atten.o_bias", "ffn.wi_bias")
    for projection in projections:
        assert any(path.endswith(f"layers[0].{projection}") for path in specs), sorted(specs)


def test_the_page_names_places_that_are_there():
    rows = (ROOT / "docs" / "map.md").read_text("utf-8").split("## Nine")[0].splitlines()[3:]
    for row in rows:
        for place in (part for part in row.split("`")[1::2] if "/" in part):
            assert any((ROOT / top / place).exists() for top in ("", "lingvo_moe")), place
