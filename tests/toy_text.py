"""A language model of a few thousand parameters with a vocabulary, for tests of the code around a model."""

import os

import numpy as np
import toy_translation as toy

from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.lm.lm_model import LmModel
from lingvo_moe.tasks.text.runs.artifacts import text_artifacts
from lingvo_moe.tasks.text.runs.run_dir import TextRunDir

VOCAB = toy.train_vocab(toy.sentences(200))


def save_run(path: str | os.PathLike, more: str = "", vocab: bytes = VOCAB) -> None:
    """A run of lm.Tiny, of one layer, with one checkpoint of random weights, whose texts vary; `more` are overrides."""
    run = TextRunDir(path)
    override = ";".join(["task.num_layers=1;task.vocab_size=400;task.position=rotary", more])
    artifacts = text_artifacts({"source": vocab, "target": vocab})
    run.Write("lm.Tiny", override.rstrip(";"), artifacts)
    rng = np.random.RandomState(0)
    specs = run.Task(LmModel).VariableSpecs()
    theta = specs.Transform(lambda spec: rng.randn(*spec.shape).astype(np.float32))
    with Checkpointer(str(run.checkpoint_dir)) as checkpointer:
        checkpointer.Save(7, NestedMap(theta=theta, step=np.int32(7)))
