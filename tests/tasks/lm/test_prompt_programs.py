"""The programs that continue prompts over a mesh: a loop over them finds what the generator's search does.

Letters: B row, P token of a prompt, T new token.
"""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core.config import registry
from lingvo_moe.core.decode.flat_beam_search import FlatBeamSearch, SearchOptions
from lingvo_moe.core.engine.pjrt import PjrtEngine
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.randomness import make_seed
from lingvo_moe.core.sharding import Mesh, single_device, use_mesh
from lingvo_moe.tasks.lm.prompt_programs import decode_programs
from lingvo_moe.tasks.lm.prompt_search import PromptSearch

ROWS, P, T = 4, 5, 6
LENGTHS = np.array([6, 4, 0, 6], np.int32)
SMALL = (
    "task.vocab_size=60;task.model_dim=16;task.hidden_dim=32;task.num_layers=2;task.key_dim=8;"
    "task.expert_hidden_dim=16"
)
LATENT = (
    "task.num_kv_heads=0;task.attention=latent;task.attention.rank=6;task.attention.turned_dim=4"
)


def _found(task, theta, ids, beam_size):
    """(ids, lengths) of the generator's search, in TensorFlow's kernels."""
    options = SearchOptions(beam_size)
    search = PromptSearch(task, options, T - 1, np.ones([task.p.vocab_size], bool))
    most = tf.constant(np.maximum(LENGTHS - 1, 0))
    run = tf.function(lambda w: search.Search(w, tf.constant(ids), most, None), autograph=False)
    found = run(theta.Transform(tf.constant))
    return found.ids_BT.numpy(), found.lengths_B.numpy()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "beam_size", "more"), [("expert:2,model:1", 1, ""), ("expert:1,model:2", 3, LATENT)]
)
def test_a_loop_over_the_programs_is_the_generators_search(mesh, beam_size, more):
    """Experts are on two devices; or heads, which share one latent vector, and the vocabulary."""
    params = registry.GetParams("lm.MoEDemo", f"{SMALL};{more}")
    task = params.task.Instantiate()
    with use_mesh(single_device()):
        theta = task.InitTheta(make_seed(4, 0)).Transform(lambda w: w.numpy())
    ids = np.random.RandomState(0).randint(4, 60, (ROWS, P)).astype(np.int32)
    expected, lengths = _found(task, theta, ids, beam_size)
    engine = PjrtEngine(Mesh.parse(mesh))
    prefill, step = map(engine.BuildStep, decode_programs(task, ROWS, P, T, beam_size))
    theta = engine.Put(theta, task.VariableSpecs())
    state, cache = prefill(theta, NestedMap(ids=ids), LENGTHS)
    for _ in range(T):
        state, cache = step(state, cache, theta)
    last = engine.Get(state).Transform(tf.constant)
    results = FlatBeamSearch(T, SearchOptions(beam_size)).Results(last)
    new = np.maximum(results.lengths_BK[:, 0] - 1, 0)
    np.testing.assert_array_equal(new, lengths)
    at = np.arange(T - 1) < new[:, None]
    np.testing.assert_array_equal(results.ids_BKT[:, 0, : T - 1] * at, expected[:, : T - 1] * at)
    assert len({tuple(row) for row in expected}) > 2
