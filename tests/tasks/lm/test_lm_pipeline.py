"""The language model in stages: its step is that without a pipeline."""

from equivalence import compare_steps

from lingvo_moe.core.config import registry
from lingvo_moe.core.engine.loop.steps import train_step
from lingvo_moe.core.engine.lowering.lowering import lower_step
from lingvo_moe.core.sharding import Mesh

STAGES = "task.pipeline.stages=2;task.pipeline.micro_batches=4"
SIZES = "task.vocab_size=40;input.target_vocab_size=40;input.target_length=8"


def _experiment(*overrides):
    params = registry.GetParams("lm.Tiny", ";".join((SIZES, *overrides)))
    return params, params.task.Instantiate(), params.input.Instantiate()


def test_a_step_in_stages_is_the_step_without_whatever_it_keeps():
    """With dropout, whose seeds belong to micro-batches and layers; rows are sharded beside the stages, of two blocks
    each. SGD's velocities are the gradients. What remat names is not computed again."""
    changes = "task.num_layers=4;task.dropout=0.3;task.position=rotary;task.optimizer=sgd"
    _, plain, inputs = _experiment(changes)
    mesh, products = "stage:2,data:2", []
    for remat in ("full", "dots"):
        more = f"task.remat={remat};task.pipeline.schedule=gpipe"
        step = train_step(_experiment(changes, STAGES, more)[1], inputs)
        products.append(lower_step(step, Mesh.parse(mesh)).Text().count("dot_general"))
    # Five products of a block, in each of four functions that differentiate one: nothing needs its last one's output.
    assert products[0] - products[1] == 4 * 5
    compare_steps(step, train_step(plain, inputs, 4), plain, inputs, mesh)
