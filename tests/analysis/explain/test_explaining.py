"""Explanations: shardings after propagation, the partitioner's communication, and the lines that cause both.

Each function under test is lowered and compiled for eight virtual devices; lines are looked up in this very file.
"""

import inspect
import json
import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf
from refusals import refusals, refuses

from lingvo_moe.analysis.explain.explaining import ExplainError, explain
from lingvo_moe.analysis.programs.partitioner import spmd
from lingvo_moe.core import sharding
from lingvo_moe.core.engine.lowering.lowering import lower
from lingvo_moe.core.engine.lowering.program import Program
from lingvo_moe.core.engine.lowering.specs import AUTO, TensorSpec
from lingvo_moe.core.sharding import Mesh, ShardingError

MESH = Mesh.parse("expert:8")
GRID = Mesh.parse("x:2,y:4")
G, S, E, C, M, H = 8, 16, 8, 4, 32, 64


def _spec(*shape, split=()):
    return TensorSpec(shape, "float32", split)


def _by_rows(*shape):
    return _spec(*shape, split=("expert", *(None,) * (len(shape) - 1)))


def _line(function, text):
    """Returns 'file:line' of the line of a function that contains a text."""
    lines, first = inspect.getsourcelines(function)
    (number,) = (i for i, line in enumerate(lines) if text in line)
    return f"{re.sub('.*/tests/', 'tests/', __file__)}:{first + number}"


def _place(line):
    return re.sub(".*tests/", "tests/", str(line))


def moe(x_GSM, dispatch_GSEC, combine_GSEC, wi_EMH, wo_EHM):
    """The paper's Algorithm 2, after the gating."""
    x_GSM = sharding.split(x_GSM, 0, 8)
    slots_EGCM = tf.einsum("GSEC,GSM->EGCM", dispatch_GSEC, x_GSM, name="dispatch")
    slots_EGCM = sharding.split(slots_EGCM, 0, 8)  # to experts
    h_EGCH = tf.nn.relu(tf.einsum("EGCM,EMH->EGCH", slots_EGCM, wi_EMH, name="wi"))
    h_EGCH = tf.identity(h_EGCH, name="activations")
    out_GECM = tf.einsum("EGCH,EHM->GECM", h_EGCH, wo_EHM, name="wo")
    out_GECM = sharding.split(out_GECM, 0, 8)  # and back
    return tf.einsum("GSEC,GECM->GSM", combine_GSEC, out_GECM, name="combine")


def moe_gradients(*args):
    with tf.GradientTape() as tape:
        tape.watch(args)
        loss = tf.reduce_sum(moe(*args) ** 2)
    return tape.gradient(loss, [args[0], args[3], args[4]])


MOE_SPECS = [
    _by_rows(*shape) for shape in ((G, S, M), (G, S, E, C), (G, S, E, C), (E, M, H), (E, H, M))
]
SLOTS_BYTES = 4 * E * G * C * M // 8  # The part of [E, G, C, M] on one device.


@pytest.fixture(scope="module")
def forward():
    return explain(moe, MOE_SPECS, MESH)


@pytest.fixture(scope="module")
def backward():
    return explain(moe_gradients, MOE_SPECS, MESH)


# --- Algorithm 2


def test_the_two_all_to_alls_are_of_the_two_lines_that_split(forward):
    found = [
        (e.what.kind, e.what.reason, e.what.num_bytes, e.what.times, e.what.participants)
        for e in forward.exchanges
    ]
    assert found == [("all-to-all", "reshard", SLOTS_BYTES, 1, 8)] * 2
    lines = [_place(e.line) for e in forward.exchanges]
    assert lines == [_line(moe, "# to experts"), _line(moe, "# and back")]
    assert [_place(e.op_line) for e in forward.exchanges] == [
        _line(moe, 'name="dispatch"'),
        _line(moe, 'name="wo"'),
    ]
    assert forward.Bytes() == forward.Bytes(spmd.RESHARD) == 2 * SLOTS_BYTES
    assert forward.compiled == {"all-to-all": 2}


def test_a_reshard_says_how_the_tensor_was_cut_and_is(forward):
    # Of the product, whose dimensions are G, E, C, M or E, G, C, M.
    for what in (exchange.what for exchange in forward.reshards):
        assert (what.shape, what.dtype) == ((8, 8, C, M), "f32")
        assert what.source.OnMesh(MESH) == ("expert", None, None, None)
        assert what.target.OnMesh(MESH) == (None, "expert", None, None)
    assert [e.tensor for e in forward.reshards] == ["dispatch/Einsum", "wo/Einsum"]


def test_annotated_tensors_have_lines_and_parts(forward):
    assert [(t.annotates, t.shape, t.part_shape) for t in forward.tensors] == [
        ("x_GSM", (G, S, M), (1, S, M)),
        ("dispatch/Einsum", (E, G, C, M), (1, G, C, M)),
        ("wo/Einsum", (G, E, C, M), (1, E, C, M)),
    ]
    assert {t.mapping[0] for t in forward.tensors} == {"expert"}
    assert [_place(t.line) for t in forward.tensors] == [
        _line(moe, "x_GSM = sharding"),
        _line(moe, "# to experts"),
        _line(moe, "# and back"),
    ]


def test_gradients_lead_to_forward_lines(backward):
    found = [e for e in backward.exchanges if e.what.phase == "backward"]
    assert [(e.what.kind, e.what.num_bytes) for e in found] == [("all-to-all", SLOTS_BYTES)] * 2
    assert [e.tensor for e in found] == ["gradient of wo/Einsum", "gradient of dispatch/Einsum"]
    assert [_place(e.op_line) for e in found] == [
        _line(moe, 'name="wo"'),
        _line(moe, 'name="dispatch"'),
    ]
    split = {_line(moe, text) for text in ("x_GSM = sharding", "# to experts", "# and back")}
    assert {_place(e.line) for e in found} <= split
    assert sum(t.phase == "backward" for t in backward.tensors) == 3
    assert {_place(t.line) for t in backward.tensors if t.phase == "backward"} == split


# --- the sharding of any tensor


def test_the_sharding_of_a_tensor_by_its_name(forward):
    (relu,) = forward.Sharding("Relu")
    assert relu.mapping == ("expert", None, None, None)
    assert (relu.shape, relu.part_shape) == ((E, G, C, H), (1, G, C, H))
    assert _place(relu.line) == _line(moe, "tf.nn.relu")
    for name, found in (("wi", "wi/Einsum"), ("activations", "Relu"), ("wo_EHM", "wo_EHM")):
        (tensor,) = forward.Sharding(name)
        assert str(tensor).startswith(f"{found}: f32[")


@refuses(
    ExplainError,
    ("Rellu", r"no tensor 'Rellu' \(did you mean 'Relu'\?\)"),
    ("Relu:1", "'Relu:1': Relu has 1 tensors"),
    ("wx_EMH", "did you mean 'wi_EMH'"),
)
def test_names_that_are_not_there(name, forward):
    forward.Sharding(name)


def test_a_scope_has_all_of_its_tensors():
    def scoped(x, w):
        with tf.name_scope("model/layer"):
            y = tf.tanh(sharding.split(x, 0, 8) @ w)
        with tf.name_scope("model/other"):
            return tf.nn.relu(y)

    explanation = explain(scoped, [_spec(16, 8), _spec(8, 8)], MESH)
    tanh = explanation.Sharding("layer/Tanh")
    assert [t.name for t in tanh] == ["model/layer/Tanh"]
    layer = {t.name for t in explanation.Sharding("model.layer")}
    assert layer == {"model/layer/XlaSharding", "model/layer/matmul", "model/layer/Tanh"}
    assert layer < {t.name for t in explanation.Sharding("model")}


# --- loops, uneven parts, partial results, halos


def test_a_loop_s_collectives_count_with_its_trips():
    def looped(x, w):
        def body(i, x):
            y = tf.tanh(sharding.split(x, 0, 8) @ w)
            return i + 1, sharding.split(y, 1, 8)  # turned

        return tf.while_loop(lambda i, _: i < 5, body, (tf.constant(0), x))[1]

    explanation = explain(looped, [_by_rows(16, 16), _spec(16, 16)], MESH)
    assert all(t.in_loop for t in explanation.tensors)
    # The loop carries columns: x becomes such once, and rows and columns again in every trip.
    part = 4 * 16 * 16 // 8
    inside, outside = ([e for e in explanation.exchanges if e.what.times == n] for n in (5, 1))
    assert [(e.what.kind, e.what.num_bytes) for e in inside] == [
        ("all-to-all", part),
        ("all-gather", 8 * part),
    ]
    assert [(e.what.kind, e.what.num_bytes) for e in outside] == [("all-to-all", part)]
    assert explanation.Bytes() == 5 * (part + 8 * part) + part
    assert _place(inside[0].line) == _line(looped, "y = tf.tanh")
    assert _place(inside[1].line) == _line(looped, "# turned")


def test_a_loop_of_unknown_length_has_times_unknown():
    def looped(x, n):
        def body(i, x):
            y = sharding.split(tf.tanh(sharding.split(x, 0, 8)), 1, 8)
            return i + 1, y

        return tf.while_loop(lambda i, _: i < n, body, (tf.constant(0), x))[1]

    explanation = explain(looped, [_by_rows(16, 16), TensorSpec((), "int32")], MESH)
    assert None in {e.what.times for e in explanation.exchanges}
    assert all(e.total_bytes == e.what.num_bytes for e in explanation.exchanges)
    assert " ? " in str(explanation)


def test_uneven_parts_are_padded():
    def uneven(x):
        return tf.reduce_sum(sharding.split(x, 0, 4), 0)

    explanation = explain(uneven, [_spec(15, 6)], MESH)
    (tensor,) = explanation.tensors
    assert (tensor.part_shape, tensor.padding, tensor.mapping) == ((4, 6), (1, 0), None)
    assert str(tensor.sharding) == "dim 0 in 4 parts, 2 copies of each"
    assert "4x6, padded" in str(explanation)
    assert "class='pad'" in explanation.ToHtml()
    assert "the rest of the part is padding" in explanation.ToHtml()
    (exchange,) = [e for e in explanation.exchanges if e.what.reason == spmd.PARTIAL]
    assert (exchange.what.kind, exchange.what.num_bytes) == ("all-reduce", 4 * 6)
    assert _place(exchange.line) == _line(uneven, "reduce_sum")


def test_a_function_of_tensorflow_s_own_has_the_line_that_explains_it():
    specs = [_by_rows(16, 8)]
    explanation = explain(tf.reduce_sum, specs, MESH)  # here
    (exchange,) = explanation.exchanges
    this = test_a_function_of_tensorflow_s_own_has_the_line_that_explains_it
    assert _place(exchange.line) == _line(this, "MESH)  # " + "here")


def test_a_halo_is_no_reshard():
    def convolved(x, w):
        return tf.nn.conv2d(sharding.split(x, 1, 8), w, 1, "SAME")

    explanation = explain(convolved, [_spec(1, 16, 4, 2), _spec(3, 3, 2, 2)], MESH)
    assert {(e.what.kind, e.what.reason) for e in explanation.exchanges} == {
        ("collective-permute", spmd.HALO)
    }
    assert {e.what.num_bytes for e in explanation.exchanges} == {4 * 1 * 4 * 2}  # one row
    assert not explanation.reshards


def test_two_axes_are_named_and_devices_can_be_permuted():
    def turned(a):
        a = sharding.mesh_split(a, GRID, ("x", "y"))
        a = sharding.mesh_split(tf.tanh(a), GRID, ("y", "x"))
        return sharding.shard(2 * a, np.arange(7, -1, -1).reshape(8, 1))

    explanation = explain(turned, [_spec(16, 16)], GRID)
    assert [t.mapping for t in explanation.tensors] == [("x", "y"), ("y", "x"), None]
    assert explanation.tensors[2].sharding.DeviceOf((0, 0)) == (7,)
    # tanh is computed already sharded in the second way, so what is sent is its operand.
    first = explanation.reshards[0].what
    assert (first.source.OnMesh(GRID), first.target.OnMesh(GRID)) == (("x", "y"), ("y", "x"))
    assert "collective-permute" in {e.what.kind for e in explanation.reshards}


def test_results_that_are_gathered_are_said_to_be_results():
    explanation = explain(
        lower(lambda x: 2 * sharding.split(x, 0, 8), [_spec(16, 4)], MESH, name="doubled")
    )
    assert [(e.what.kind, e.what.reason) for e in explanation.exchanges] == [
        ("all-gather", spmd.RESULT)
    ]
    assert "doubled" in str(explanation)


# --- programs


def test_lines_are_no_part_of_a_program_s_hash_nor_of_its_file(tmp_path):
    program = lower(moe, MOE_SPECS, MESH, results=AUTO)
    assert program.sources is not None
    bare = Program(program.signature, program.exported)
    assert bare == program
    assert bare.hash == program.hash
    paths = [str(tmp_path / name) for name in ("moe.program", "bare.program")]
    for path, one in zip(paths, (program, bare), strict=True):
        one.Save(path)
    assert pathlib.Path(paths[0]).read_bytes() == pathlib.Path(paths[1]).read_bytes()
    loaded = Program.Load(paths[0])
    assert loaded.sources is None
    explanation = explain(loaded)
    assert [e.line for e in explanation.exchanges] == [None, None]
    assert [e.what.op for e in explanation.exchanges] == ["dispatch/Einsum", "wo/Einsum"]
    assert [t.annotates for t in explanation.tensors] == ["x_GSM", "dispatch/Einsum", "wo/Einsum"]
    assert explanation.Sharding("wi")[0].mapping == ("expert", None, None, None)
    with pytest.raises(ExplainError, match="no tensor 'activations'"):  # of tf.identity
        explanation.Sharding("activations")


test_what_cannot_be_explained = refusals(ExplainError,
    (lambda: explain(moe), "moe is a function, and it takes arg_specs"),
    (lambda: explain(moe, MOE_SPECS), "takes a mesh"),
    (lambda: explain(lambda x: x, [_spec(4)], Mesh.parse("d:1")), "is for one device, mesh d:1"),
    (lambda: explain(lower(lambda x: x, [_spec(4)], MESH), [_spec(4)]), "arg_specs and mesh are for a function"),
    (lambda: explain("step.program"), "'step.program' is neither a program nor a function"),
    (lambda: explain(moe, MOE_SPECS, 8), ShardingError, "explain: mesh is a int; give a sharding.Mesh"),
)  # fmt: skip


# --- printed and drawn


def test_the_text_is_aligned_and_complete(backward):
    text = str(backward)
    assert text.startswith("Program 'moe_gradients' on mesh expert:8, 8 devices\n")
    assert "Annotated tensors: 6, of which 3 in gradients" in text
    assert f"Communication: 4 collectives, {4 * SLOTS_BYTES / 1024:.1f} KiB" in text
    rows = [line for line in text.splitlines() if "all-to-all" in line]
    assert len(rows) == 4
    assert len({row.index("all-to-all") for row in rows}) == 1
    assert _line(moe, "# to experts").rpartition("/")[2] in text


def test_json_has_all_of_it(backward):
    data = json.loads(json.dumps(backward.ToJson()))
    assert (data["version"], data["program"], data["mesh"]) == (1, "moe_gradients", "expert:8")
    assert data["annotated"][0]["mapping"] == ["expert", None, None]
    assert data["annotated"][1]["sharding"] == "{devices=[8,1,1,1]0,1,2,3,4,5,6,7}"
    assert [e["num_bytes"] for e in data["exchanges"]] == [SLOTS_BYTES] * 4
    assert data["exchanges"][0]["target"] == "{devices=[1,8,1,1]0,1,2,3,4,5,6,7}"
    assert data["compiled"] == {"all-to-all": 4}


def test_the_page_stands_alone_and_shows_lines(forward):
    page = forward.ToHtml()
    assert not re.search(r"(?:src|href)=|<script|@import|url\((?!#)", page)
    assert "slots_EGCM = sharding.split(slots_EGCM, 0, 8)  # to experts" in page
    assert page.count("class='flow'") == 2
    # A card for each annotated tensor and two drawings a reshard, of eight parts each.
    assert page.count("<svg class='shards'") == 3 + 2 * 2
    assert page.count("<g><title>") == 8 * (3 + 2 * 2)


def test_what_the_partitioner_gets_wrong_is_named_with_its_line(forward):
    grid = Mesh.parse("data:2,model:4")

    def rows(x, y):
        x, y = (sharding.mesh_split(t, grid, ("data", "model")) for t in (x, y))
        return sharding.mesh_split(tf.einsum("fa,fa->f", x, y), grid, ("model",))  # wrong

    specs = [TensorSpec((16, 16), "float32")] * 2
    explanation = explain(rows, specs, grid)
    (found,) = explanation.wrong
    assert found.line.text.endswith("# wrong")
    assert "WRONG NUMBERS" in str(explanation) and str(found) in str(explanation)
    assert "Wrong numbers" in explanation.ToHtml()
    assert explanation.ToJson()["wrong"][0]["line"] == found.line.place
    with pytest.raises(ShardingError, match=r"'rows'.*wrong numbers for 1 operation.*\n.*Instead"):
        explanation.Check()
    forward.Check()
    assert forward.wrong == [] and "WRONG" not in str(forward)


def test_what_is_wrong_is_named_for_a_tpu_slice_too():
    """A plan for it is refused likewise (tests/analysis/programs/test_checking.py)."""

    def sum_by_ids(x, ids):
        return tf.math.unsorted_segment_sum(sharding.split(x, 0, 8) + 5.0, ids, 4)

    specs = [TensorSpec((15, 6), "float32"), TensorSpec((15,), "int32")]
    explanation = explain(sum_by_ids, specs, Mesh.parse("data:2,model:4"), topology="v3:2x2")
    (found,) = explanation.wrong
    assert "UnsortedSegmentSum: the updates are sharded unevenly" in str(found)
