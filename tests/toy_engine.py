"""A complete engine, `--engine=toy`, in one file: TensorFlow runs the operations of a step one by one, every time."""

import tensorflow as tf

from lingvo_moe.api import Compiled, Engine, engines, kernels, map_with_specs, use_mesh
from lingvo_moe.core.kernels import tensorflow


@engines.Register
class ToyEngine(Engine):
    NAME, ONE_DEVICE, XLA = "toy", True, False

    def __init__(self, mesh):
        self.mesh = mesh

    def BuildStep(self, step):
        return _Interpreted(self, step)

    def Put(self, tree, specs):
        return map_with_specs(lambda value, spec: tf.convert_to_tensor(value), tree, specs)


class _Interpreted(Compiled):
    def __init__(self, engine, step):
        self._engine, self._step = engine, step

    def __call__(self, *args):
        args = map(self._engine.Put, args, self._step.arg_specs)
        with use_mesh(self._engine.mesh), kernels.using(tensorflow):
            return self._step.fn(*args)

    def Run(self, leaves):
        raise NotImplementedError
