"""Image experiments in training: the same losses on any number of devices, a folder of images, held-out scores."""

import json

import numpy as np
import pytest
from PIL import Image
from trainer_testing import keep_compiled, status

from lingvo_moe.core.engine import engines
from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer
from lingvo_moe.core.engine.engines import make_engine
from lingvo_moe.core.engine.loop.steps import train_step
from lingvo_moe.core.engine.loop.summaries import read_metrics
from lingvo_moe.core.engine.lowering.specs import TensorSpec
from lingvo_moe.core.sharding import Mesh
from lingvo_moe.params.image.digits import Digits
from lingvo_moe.tasks.image.evaluation import evaluate
from tools import evaluate_images

STEPS = 4


def _losses(engine_name: str, mesh: str) -> list[np.ndarray]:
    """The losses and gradient norms of the first steps of image.Digits, and one moving variance."""
    task = Digits().Task().Instantiate()
    inputs = Digits().Input().Set(batch_size=32).Instantiate().Prepare()
    engine = make_engine(engine_name, Mesh.parse(mesh))
    specs = task.StateSpecs()
    init = engine.Build(task.InitState, [TensorSpec((), "int32")], results=specs)
    state, step = init(np.int32(5)), engine.BuildStep(train_step(task, inputs))
    found = []
    for _, batch in zip(range(STEPS), inputs, strict=False):
        state, metrics = step(state, batch)
        found.append([metrics.loss, metrics.grad_norm])
    variance = state.theta.network.stage_1.conv.norm.moving_variance
    return [np.array(engine.Get(found)), np.asarray(engine.Get(variance))]


@pytest.mark.slow
def test_losses_do_not_depend_on_devices_or_engine():
    reference = _losses("tf_graph", "data:1")
    for got, want in zip(_losses("pjrt", "data:8"), reference, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4)
    assert reference[0][-1, 0] < reference[0][0, 0]


OVERRIDE = ";".join(
    [
        "task.network.base_channels=4",
        "task.network.blocks=[1, 1]",
        "task.num_classes=2",
        "task.fprop_dtype=float32",
        "input.image_size=32",
        "input.batch_size=8",
        "train.summary_interval_steps=1",
        "train.save_interval_steps=2",
    ]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Bright and dark images, 12 to train on and 10 held out."""
    root = tmp_path_factory.mktemp("images")
    rng = np.random.RandomState(0)
    for split, number in (("train", 6), ("validation", 5)):
        for name, level in (("bright", 200), ("dark", 50)):
            (root / split / name).mkdir(parents=True)
            for i in range(number):
                pixels = rng.randint(level - 40, level + 40, (40, 50, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{i}.jpg")
    return root


@pytest.mark.slow
def test_resnet_on_a_folder_trains_resumes_and_is_scored(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(engines, "make_engine", engines.make_engine)  # put back in the end
    keep_compiled()
    run = tmp_path / "run"
    train = [
        "--model=image.ResNet50",
        f"--data_dir={folder}",
        f"--logdir={run}",
        "--mesh=data:2",
        "--engine=pjrt",
        f"--model_params_override={OVERRIDE};task.ema_decay=0.9",
    ]
    assert status(*train, "--max_steps=2") == 0
    train[-1] += ";train.eval_interval_steps=3"
    assert status(*train, "--max_steps=3") == 0
    lines = (run / "train" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(np.isfinite(row["loss"]) and row["images"] == 8 for row in rows)
    assert json.loads((run / "classes.json").read_bytes()) == ["bright", "dark"]

    restore, steps = Checkpointer.RestoreToNumpy, Checkpointer.Steps

    def restore_while_a_step_is_saved(self, *args):
        restored = restore(self, *args)
        monkeypatch.setattr(Checkpointer, "Steps", lambda self: [*steps(self), 4])
        return restored

    monkeypatch.setattr(Checkpointer, "RestoreToNumpy", restore_while_a_step_is_saved)
    assert evaluate_images.main([f"--logdir={run}"]) == 0
    assert "step 3, 10 held-out images: top-1" in capsys.readouterr().out
    scores = json.loads((run / "scores.json").read_bytes())
    assert (scores["step"], scores["images"], scores["top5"]) == (3, 10, 1.0)
    assert 0 <= scores["top1"] <= 1 and not scores["ema"]
    assert evaluate_images.main([f"--logdir={run}", "--use_ema", "--checkpoint_step=best"]) == 0
    assert "step 3, moving average, 10 held-out images: top-1" in capsys.readouterr().out
    averaged = json.loads((run / "scores.json").read_bytes())
    assert averaged["ema"] and averaged["nll"] != scores["nll"]
    # The trainer evaluated the average, over two devices.
    (row,) = read_metrics(str(run / "eval" / "held_out"))
    assert row["step"] == 3 and row["images"] == 10
    for name in ("nll", "top1", "top5"):
        assert row[name] == pytest.approx(averaged[name], rel=1e-4)


def test_parameters_that_do_not_fit_or_have_no_effect_are_refused(folder, tmp_path, capsys):
    flags = [f"--data_dir={folder}", f"--logdir={tmp_path / 'run'}", "--model=image.ResNet50"]
    override = OVERRIDE.replace("num_classes=2", "num_classes=1")
    assert status(*flags, f"--model_params_override={override}", "--mesh=data:1") == 2
    assert "the data has 2 classes, but task.num_classes=1" in capsys.readouterr().err
    override = f"{OVERRIDE};input.channels=1"
    assert status(*flags, f"--model_params_override={override}", "--mesh=data:1") == 2
    assert "input.channels=1, but task.channels=3" in capsys.readouterr().err
    override = f"{OVERRIDE};task.head.num_classes=3"
    assert status(*flags, f"--model_params_override={override}", "--mesh=data:1") == 2
    assert "task.head.num_classes=3: has no effect" in capsys.readouterr().err


@pytest.mark.slow  # 300 steps: 15 s of a CPU
def test_digits_reach_97_percent_on_8_devices(tmp_path):
    run = tmp_path / "run"
    flags = ["--model=image.Digits", f"--logdir={run}", "--mesh=data:8", "--engine=pjrt"]
    assert status(*flags) == 0
    assert evaluate(run).top1 >= 0.97
