"""tools.verify and xs.verify: a program over a mesh equals one device, or the first difference is named."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
import toy_attention

from lingvo_moe import trainer, xla_sharding as xs
from lingvo_moe.analysis.explain import verifying
from lingvo_moe.analysis.explain.verifying import VerifyError
from lingvo_moe.core.config import registry
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.task.meshes import check_divisible
from lingvo_moe.training import flags as trainer_flags
from lingvo_moe.training.checks import UsageError
from tools import verify

MESH = xs.Mesh.parse("a:4,b:2")


def attention(probs_axes):
    """Attention in bfloat16; the steps of toy_attention are in float32."""

    def fn(x, w):
        v, o = (
            xs.mesh_split(w["v"], MESH, (None, "a", "b")),
            xs.mesh_split(w["o"], MESH, ("a", "b", None)),
        )
        q, k, v = (tf.einsum("BTM,MNH->BTNH", x, m) for m in (w["q"], w["k"], v))
        probs = tf.nn.softmax(tf.einsum("BTNH,BSNH->BNTS", q, k))
        context = tf.einsum("BNTS,BSNH->BTNH", xs.mesh_split(probs, MESH, probs_axes), v)
        return tf.einsum("BTNH,NHM->BTM", context, o)

    shapes = {"q": (16, 8, 8), "k": (16, 8, 8), "v": (16, 8, 8), "o": (8, 8, 16)}
    specs = {name: TensorSpec(shape, "bfloat16") for name, shape in shapes.items()}
    return fn, TensorSpec((8, 16, 16), "bfloat16"), specs


def test_a_function_whose_gradients_are_wrong_over_a_mesh():
    fn, x, weights = attention(("a", "b", None, None))
    message = r"fn over mesh a:4,b:2 .*gradient of args\[0\]\[8, 16, 16\] is off"
    with pytest.raises(VerifyError, match=message):
        xs.verify(fn, MESH, x, weights)


def test_a_function_that_is_right():
    fn, x, weights = attention((None, "a", None, None))
    xs.verify(fn, MESH, x, weights)


def test_a_function_of_integers_and_a_tensor_that_is_right():
    xs.verify(
        lambda i, y: tf.gather(xs.split(y, 0, 8), i),
        MESH,
        np.arange(3, dtype=np.int32),
        tf.ones([16, 2]),
    )


def test_a_step_that_is_wrong_is_named_by_tensor_error_and_letters(capsys):
    assert verify.main(["--model=toy_attention.Wrong", "--mesh=a:4,b:2"]) == 1
    said = capsys.readouterr().err
    told = "the training step of toy_attention.Wrong over mesh a:4,b:2 is not what it is on one"
    assert told in said
    assert "gradient of theta.k[16, 8, 8] (MPR) is off by" in said


def test_a_step_that_is_right(capsys, monkeypatch):
    compared, verify_model = [], verifying.verify_model

    def recording(*args):
        found = verify_model(*args)
        compared.extend(found.names)
        return found

    monkeypatch.setattr(verifying, "verify_model", recording)
    assert verify.main(["--model=toy_attention.Right", "--mesh=a:4,b:2"]) == 0
    said = capsys.readouterr().out
    assert f"over mesh a:4,b:2: {len(compared)} tensors" in said
    assert re.search(r"program has .*\b\d+ all-reduce\b", said)
    assert compared[0].startswith("metric ")
    assert {f"gradient of theta.{name}" for name in "qkvo"} < set(compared)
    assert {"new theta.q", "new step"} < set(compared)


@pytest.mark.parametrize("got, want, expected", [
    ([np.nan, 1.0], [0.0, 1.0], np.inf),
    ([np.inf, 1.0], [-np.inf, 1.0], np.inf),
    ([np.inf, np.nan, 1.0], [np.inf, np.nan, 1.0], 0.0),
    ([np.inf, 1.0, 3.0], [np.inf, 1.0, 4.0], 0.25),  # a shared infinity hides nothing
    ([1.0 + 1j], [1.0 + 0j], 1.0),
])  # fmt: skip
def test_values_that_are_not_finite_have_to_be_equal_and_the_others_are_compared(
    got, want, expected
):
    assert verifying._error(np.array(got), np.array(want)) == expected


def test_what_is_not_finite_on_one_device_is_not_verified(monkeypatch):
    with pytest.raises(VerifyError, match=r"not finite on one device: nothing is verified.*result"):
        xs.verify(lambda x: tf.math.log(xs.split(x, 0, 8)), MESH, -np.ones(16, np.float32))
    nan = NestedMap(x=np.full((8, 16, 16), np.nan, np.float32))
    monkeypatch.setattr(toy_attention.AttentionModel, "SampleBatch", lambda *_: nan)
    message = r"the shrunk step of toy_attention.Right is not finite on one device: nothing.*loss"
    with pytest.raises(VerifyError, match=message):
        verifying.verify_model("toy_attention.Right", MESH)


@pytest.mark.parametrize("model", ["mt.M4MoE2048E36L", "mt.T96L", "mt.M4Demo"])
def test_sizes_of_translation_models_are_small_and_divide(model):
    params = registry.GetParams(model)
    axes = xs.Mesh.parse(params.train.mesh).axis_names
    mesh = xs.Mesh(axes, (3,) * len(axes))
    params = verifying.shrunk(model, mesh, "task.repeat=True")  # else a step is traced to choose
    task = params.task.Instantiate()
    assert params.task.num_encoder_layers == params.task.num_decoder_layers == 2
    assert sum(np.prod(s.shape) for s in task.VariableSpecs().Flatten()) < 200_000
    assert bool(params.task.num_experts) == bool(registry.GetParams(model).task.num_experts)
    batch = task.SampleBatch(params.input.Instantiate(), np.random.RandomState(0))
    for spec, array in zip(params.input.Instantiate().BatchSpec().Flatten(), batch.Flatten()):
        assert (array.shape, array.dtype.name) == (spec.shape, spec.dtype)
    assert batch.src.ids.min() >= 3 and batch.src.ids.max() < params.task.source_vocab_size
    assert set(np.unique(batch.tgt.segment_ids)) == {0, 1, 2}


def test_experts_are_as_many_as_the_decoder_s_own_router_chooses():
    own = "task.decoder_router=top_k;task.decoder_router.k=6;task.repeat=True"
    params = verifying.shrunk("mt.M4Demo", xs.Mesh.parse("expert:2"), own)
    assert params.task.num_experts == 6
    params.task.Instantiate()


def test_full_sizes_that_a_mesh_does_not_divide_are_those_of_one_device_of_that_mesh():
    override = "task.activation_split={'B': 'data'};task.weight_split={'M': 'data'}"
    params = verifying.shrunk("mt.M4Demo", xs.Mesh.parse("data:5,expert:7"), override)
    assert params.task.model_dim % 5 == 0


@pytest.mark.parametrize("model", ["image.Digits", "image.ResNet50Classes130K"])
def test_sizes_of_image_models_are_small_and_divide(model):
    mesh = xs.Mesh.parse("data:6")
    params = verifying.shrunk(model, mesh, "task.network.activation_split={'O': 'data'}")
    task, inputs = params.task.Instantiate(), params.input.Instantiate()
    check_divisible(params, task, mesh)
    assert params.task.network.cls.OutputChannels(params.task.network) % 6 == 0
    assert sum(np.prod(s.shape) for s in task.VariableSpecs().Flatten()) < 20_000
    batch = task.SampleBatch(inputs, np.random.RandomState(0))
    assert batch.images.shape == (6, *2 * [params.input.image_size], params.input.channels)
    for spec, array in zip(inputs.BatchSpec().Flatten(), batch.Flatten(), strict=True):
        assert (array.shape, array.dtype.name) == (spec.shape, spec.dtype)
    assert batch.labels[-1] == -1 and batch.labels[:-1].min() >= 0
    assert batch.labels.max() < params.task.num_classes and params.input.image_size <= 16


def test_a_convolutional_network_is_verified():
    found = verifying.verify_model("image.Digits", xs.Mesh.parse("data:2"))
    assert {"metric loss", "gradient of theta.network.stage_0.conv.conv.w"} < set(found.names)


def test_the_trainer_verifies_before_it_trains():
    args = trainer_flags.parse_flags(["--model=toy_attention.Wrong", "--verify"])
    job = SimpleNamespace(args=args, override="")
    with pytest.raises(UsageError, match=r"--verify: mesh a:1 has one device, so .*nothing"):
        trainer.verify_step(job, xs.Mesh.parse("a:1"), on_cpu=True)
    with pytest.raises(VerifyError, match=r"toy_attention.Wrong over mesh a:4,b:2 is not"):
        trainer.verify_step(job, MESH, on_cpu=True)
    with pytest.raises(UsageError, match=r"--verify: .*tools.verify --model=toy_attention.Wrong"):
        trainer.verify_step(job, MESH, on_cpu=False)
