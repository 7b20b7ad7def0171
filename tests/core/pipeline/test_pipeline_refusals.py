"""Pipelines that are refused, in one table: the call, and a part of the message."""

from dataclasses import replace

import tensorflow as tf
from pipeline_toys import Dense, WithExtras, cell_toy, cells, make
from refusals import refusals

from lingvo_moe.core.optimizers.adafactor import Adafactor
from lingvo_moe.core.optimizers.sgd import Sgd
from lingvo_moe.core.pipeline.cells import FeatureExtractionLayer
from lingvo_moe.core.pipeline.layers import PipeliningLayer
from lingvo_moe.core.pipeline.params import Settings, schedule_on
from lingvo_moe.core.pipeline.partition import (
    PartitionSequentialLayers,
    divided,
    histogram_partition,
    optimal_partition,
)
from lingvo_moe.core.pipeline.parts import Context
from lingvo_moe.core.pipeline.schedule import make_schedule
from lingvo_moe.core.pipeline.stage_vectors import from_paths
from lingvo_moe.core.sharding import Mesh, single_device, use_mesh
from tests.core.pipeline.toy_stacks import toy

STAGES = {"weight_split": {"Z": "stage"}}


class LosesRows(Dense):
    def FProp(self, theta, x, mask=None):
        return super().FProp(theta, x[:1])


def _stages(stages, micro_batches, devices="stage:1", name="1f1b", repeats=1, splits=()):
    settings = Settings(stages, micro_batches, name, repeats, splits=splits)
    return schedule_on(settings, [("decoder", 5)], {"B": "data"}, Mesh.parse(devices))


def _sequence(rows=1, **params):
    layer = FeatureExtractionLayer.Params().Set(name="d0", sub=cells()).Set(**params).Instantiate()
    with use_mesh(single_device()):
        return layer.FProp(_zeros(layer), tf.ones([rows, 5]))


def _cells(cell=Dense, devices=1, batch_dim=0):
    task, batch, _ = cell_toy(cell=cell, stages=4, micro_batches=1)
    parts = replace(task.PipelineParts(), batch_dim=batch_dim)
    theta, context = _zeros(task), Context(batch.Transform(tf.constant), tf.zeros([2], tf.int32))
    with use_mesh(single_device()):
        return parts.Traced(theta, lambda: context, 1, devices)


def _zeros(layer):
    return layer.VariableSpecs().Transform(lambda s: tf.zeros(s.shape, s.dtype))


def _packed():
    return make(PipeliningLayer, WithExtras, **STAGES).VariableSpecs()


test_what_is_refused = refusals((ValueError, KeyError),
    (lambda: make_schedule("1f1b", 0, 4), "stages=0: must be 1 or more"),
    (lambda: make_schedule("1f1b", 2, 0), "micro_batches=0: must be 1 or more"),
    (lambda: make_schedule("1f1b", 2, 4, 2), "schedule=1f1b has repeats=1, got 2; schedule=interl"),
    (lambda: make_schedule("interleaved", 2, 4), "schedule=interleaved needs repeats=2 or more"),
    (lambda: make_schedule("interleaved", 4, 6, 2), "must be a multiple of stages=4"),
    (lambda: make_schedule("2f1b", 4, 6), "schedule='2f1b': choose one of gpipe, 1f1b, interleav"),
    (lambda: _stages(2, 4, splits=(2, 4)), "splits=[2, 4]: must be 2 ascending numbers of blocks"),
    (lambda: _stages(2, 4, splits=(5, 5)), "must be 2 ascending numbers"),
    (lambda: _stages(2, 4, name="gpipe", repeats=2, splits=(2, 5)), "goes with task.pipeline.repe"),
    (lambda: _stages(4, 8, "stage:1,data:3"), "micro_batches=8: must be a multiple of 3, since each"),
    (lambda: histogram_partition([7] * 4, 4), "gives part 0 no layer"),
    (lambda: histogram_partition([1, 1], 3), "num_partitions=3: there are only 2 layers"),
    (lambda: optimal_partition([1, 1], 0), "num_partitions=0: must be an integer of at least 1"),
    (lambda: PartitionSequentialLayers(cells(), 2, (8, 5), rule="best"), "rule=best: must be one"),
    (lambda: _sequence(sub=[cells()[0].Set(name="")]), "layer 0 of sub="),
    (lambda: make(PipeliningLayer, cell_tpl=[]), "cell_tpl=[]: must have at least one cell"),
    (lambda: _cells(devices=3), "16 rows of a micro-batch do not divide among the 3 devices"),
    (lambda: _cells(batch_dim=1), "dimension batch_dim=1 of all of them counts rows"),
    (lambda: _cells(LosesRows), "cell 0 returns a tensor of shape (1, 7) for 16"),
    (lambda: divided([1] * 5, 2, [2, 4]), "splits=[2, 4]: must be 2 ascending numbers of layers"),
    (lambda: from_paths(_packed(), {}), "seq.after.b: there is no value for this variable"),
    (lambda: Sgd.Params().Set(decay_exclude=["seq.c1.w"]).Instantiate().SlotSpecs(_packed()),
     "seq.c0.w decays and seq.c1.w does not"),
    (lambda: Sgd.Params().Set(slow=["seq.c1.w"]).Instantiate().SlotSpecs(_packed()),
     "slow=['seq.c1.w']: seq.c1.w learns slowly and seq.c0.w does not"),
    (lambda: Adafactor.Params().Instantiate().SlotSpecs(_packed()), "update depends on their shapes"),
    (lambda: toy(stages=2, schedule="gpip"), "schedule='gpip': must be one of"),
    plain=True,
)  # fmt: skip
