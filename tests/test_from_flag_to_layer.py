"""The way from the trainer's flags to a layer's FProp on one device is short, and builds the experiment once."""

import sys
import threading
import traceback
from pathlib import Path

import tensorflow as tf
import toy_task
from trainer_testing import status

import lingvo_moe
from lingvo_moe.core.base_layer import BaseLayer

_PACKAGE = str(Path(lingvo_moe.__file__).parent)
_stacks: list[list[str]] = []
_built: list[type] = []


class Head(BaseLayer):
    def FProp(self, theta, y):
        # A thread traces, for which the main one waits.
        waiting = sys._current_frames()[threading.main_thread().ident]
        frames = [*traceback.extract_stack(waiting), *traceback.extract_stack()]
        _stacks.append([f.filename for f in frames if f.filename.startswith(_PACKAGE)])
        return tf.identity(y)


class TwoLayers(toy_task.LinearModel):
    def __init__(self, params):
        super().__init__(params)
        self.CreateChild("head", Head.Params())

    def FProp(self, theta, batch, seed=None):
        loss, metrics = toy_task.LinearModel.FProp(self, theta, batch)
        return self.head.FProp(theta.head, loss), metrics


class Line(toy_task.Line):
    def Task(self):
        return TwoLayers.Params().Set(name="line", activation_split={"B": "data"})

    def Input(self):
        _built.append(type(self))
        return super().Input()


def test_calls_files_and_experiments_from_main_to_a_layer(tmp_path):
    flags = f"--model={__name__}.Line", f"--logdir={tmp_path}/run", "--num_devices=1"
    assert [status(*flags, f"--max_steps={steps}") for steps in (1, 2)] == [0, 0]
    assert len(_built) == 2  # once a start, of a new run and of one that goes on
    assert len(_stacks) == 2
    for files in _stacks:
        assert files[0].endswith("/lingvo_moe/trainer.py")
        assert len(files) <= 15 and len(set(files)) <= 8, "\n".join(files)
