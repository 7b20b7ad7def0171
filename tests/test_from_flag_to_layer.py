"""The way from the trainer's flags to a layer's FProp on one device is short, and builds the experiment once."""

import sys
import threading
import traceback
from pathlib import Path

import tensorflow as tf
import toy_held_out
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


class Line(toy_held_out.Line):
    def Task(self):
        return TwoLayers.Params().Set(name="line", activation_split={"B": "data"})

    def Input(self):
        _built.append(type(self))
        return super().Input()

    def Train(self):
        return super().Train().Set(eval_interval_steps=0)


def test_calls_files_and_experiments_from_main_to_a_layer(tmp_path):
    flags = f"--model={__name__}.Line", f"--logdir={tmp_path}/run"
    (tmp_path / "strategy.txt").write_text("train.mesh=data:1\n")
    more: tuple[str, ...] = ()
    for steps in (1, 2, 3):  # a new run, one that goes on, and with a strategy
        assert status(*flags, "--num_devices=1", f"--max_steps={steps}", *more) == 0
        more = (f"--strategy={tmp_path}/strategy.txt",) if steps == 2 else ()
    assert len(_stacks) == 3
    for files in _stacks:
        assert files[0].endswith("/lingvo_moe/trainer.py")
        assert len(files) <= 15 and len(set(files)) <= 8, "\n".join(files)
    assert status(*flags, "--mode=eval", "--once") == 0
    assert len(_built) == 4  # once a start
