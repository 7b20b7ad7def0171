"""A mistake in a user's own code is reported with the user's line, in the trainer, the tools and shard_function."""

import inspect
import re

import numpy as np
import pytest
import tensorflow as tf
import toy_task

from lingvo_moe import trainer, xla_sharding as xs
from lingvo_moe.core.base_layer import scoped
from lingvo_moe.core.engine.lowering.tracing import LoweringError
from lingvo_moe.core.nested_map import NestedMap
from tools import explain, plan

_MESH = xs.Mesh.parse("data:2,model:4")


# Each makes the mistake with x [B, 8] and w [8], and says on which line.


def _shape(x, w):
    return tf.einsum("BM,M->B", x, w) + x  # here


def _numpy_shape(x, w):
    return np.zeros(4).reshape(3) + tf.einsum("BM,M->B", x, w)  # here


def _raises(x, w):
    raise ValueError("heads must divide 8")  # here


def _branch(x, w):
    if tf.reduce_sum(x) > 0:  # here
        return x
    return w


def _key(x, w):
    return NestedMap(x=x)["y"]  # here


def _attribute(x, w):
    return NestedMap(x=x).y + w  # here


def _type(x, w):
    return x + "a" + w  # here


def _array(x, w):
    return np.asarray(x) + w  # here


def _file(x, w):
    return open("/no/such/file").read()  # here


def _in_a_loop(x, w):
    def body(i, y):
        return i + 1, y + tf.zeros([3])  # here

    return tf.while_loop(lambda i, y: i < 3, body, (0, x))[1]


_MISTAKES = [
    (_shape, "ValueError: Dimensions must be equal, but are 16 and 8 for"),
    (_numpy_shape, "ValueError: cannot reshape array of size 4"),
    (_raises, "ValueError: heads must divide 8"),
    (_branch, "OperatorNotAllowedInGraphError: Using a symbolic `tf.Tensor` as a Python `bool` is not allowed."),
    (_key, "KeyError: 'y'"),
    (_attribute, "AttributeError: NestedMap has no 'y'"),
    (_type, "TypeError: Input 'y' of 'AddV2' Op has type string"),
    (_array, "NotImplementedError: Cannot convert a symbolic tf.Tensor"),
    (_file, "FileNotFoundError: [Errno 2] No such file or directory: '/no/such/file'"),
    (_in_a_loop, "ValueError: Dimensions must be equal, but are 8 and 3 for"),
]  # fmt: skip


def _line(function, mark="# here"):
    """The number and the text of the line of a function that has a mark."""
    lines, first = inspect.getsourcelines(function)
    ((number, text),) = [(i, line) for i, line in enumerate(lines, first) if mark in line]
    return number, text.strip()


def _place(function, path="line"):
    """Returns a pattern: how a report names the line of a function that a layer's FProp calls; path '' for no layer."""
    number, text = _line(function)
    layer = f" of layer {path}" if path else ""
    return rf"\S*test_user_mistakes\.py:{number} in \w+{layer}: {re.escape(text)}"


def _train(tmp_path, *flags):
    given = ["--model=toy_task.Line", f"--logdir={tmp_path / 'run'}", "--max_steps=1", *flags]
    return trainer.main(given)


@pytest.fixture
def in_fprop(monkeypatch):
    """Makes the toy task's FProp call a function of x [B, 8] and w [8]."""

    def put(function):
        def FProp(self, theta, batch, seed=None):
            loss = tf.reduce_mean(function(batch.x, theta.w))
            return loss, NestedMap(loss=loss, examples=tf.constant(16.0))

        monkeypatch.setattr(toy_task.LinearModel, "FProp", scoped(FProp))

    return put


@pytest.mark.parametrize("function, message", _MISTAKES)
def test_the_trainer_shows_the_user_s_line(function, message, in_fprop, tmp_path, capsys):
    in_fprop(function)
    assert _train(tmp_path, "--engine=tf_graph", "--num_devices=1") == 2
    said = capsys.readouterr().err
    report = said[said.index("error: ") :]
    assert report.startswith(f"error: {message}") and "Traceback" not in report
    assert re.search(f"^  {_place(function)}$", report, re.MULTILINE), report
    assert report.endswith("\n  --traceback shows the whole traceback\n")
    assert len(report.splitlines()) <= 4


def test_with_the_flag_it_shows_the_whole_traceback(in_fprop, tmp_path, capsys):
    in_fprop(_key)
    assert _train(tmp_path, "--engine=tf_graph", "--num_devices=1", "--traceback") == 2
    said = capsys.readouterr().err
    assert re.search(r'Traceback.*\n  File ".*trainer\.py".*KeyError: .y', said, re.DOTALL)
    assert re.search(f"^  {_place(_key)}$", said, re.MULTILINE) and "--traceback shows" not in said


@pytest.mark.parametrize("function, message", _MISTAKES[:5])
def test_tools_show_the_user_s_line(function, message, in_fprop, capsys):
    in_fprop(function)
    assert explain.main(["--model=toy_task.Line", "--mesh=data:2"]) == 1
    said = capsys.readouterr().err
    assert f"explain: {message}" in said and re.search(_place(function), said), said


def test_a_plan_for_several_machines_shows_the_user_s_line(in_fprop, capsys):
    in_fprop(_shape)
    given = ["--model=toy_task.Line", "--topology=v3:2x2,v5e:2x2", "--mesh=data:4", "--cache_dir="]
    assert plan.main(given) == 1
    said = capsys.readouterr().err
    assert "plan: ValueError: Dimensions" in said and re.search(_place(_shape), said), said


@pytest.mark.parametrize("function, message", _MISTAKES)
def test_shard_function_ends_its_traceback_with_the_user_s_line(function, message):
    sharded = xs.shard_function(function, mesh=_MESH)
    error, text = message.split(": ", 1)
    with pytest.raises(Exception) as found:
        sharded(tf.ones([16, 8]), tf.ones([8]))
    assert type(found.value).__name__ == error and text in str(found.value)
    assert re.fullmatch(_place(function, ""), found.value.__notes__[0])


def test_an_operand_of_a_message_is_explained():
    """The message of TensorFlow names a tensor of the user's after the annotation that it has."""

    def annotated(x, w):
        return xs.mesh_split(x, _MESH, ("data", None)) @ w  # here

    with pytest.raises(ValueError, match="XlaSharding") as found:
        xs.shard_function(annotated, mesh=_MESH)(tf.ones([16, 8]), tf.ones([4, 8]))
    place, hint = found.value.__notes__
    assert re.fullmatch(_place(annotated, ""), place)
    assert hint.startswith("XlaSharding is a tensor that Shard, mesh_split or a sharding of an arg")


def test_a_refusal_of_an_annotation_has_the_user_s_line(in_fprop, tmp_path, capsys):
    def annotated(x, w):
        return xs.mesh_split(x, _MESH, ("data", None, None))  # here

    in_fprop(annotated)
    assert _train(tmp_path, "--engine=tf_graph", "--num_devices=1") == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(rf"error: mesh_split\(.* \({_place(annotated)}\)", last)


def _print(x, w):
    tf.print("x", x)  # here
    return x + w


def _python(x, w):
    return tf.ensure_shape(tf.numpy_function(np.tanh, [x], tf.float32), x.shape) + w  # here


@pytest.mark.parametrize("function, kind", [(_print, "StringFormat"), (_python, "PyFunc")])
def test_what_xla_does_not_compile_has_the_user_s_line(function, kind, in_fprop, tmp_path, capsys):
    number, text = _line(function)
    said = rf"{number} in {function.__name__}: {re.escape(text)}: XLA has no operation {kind} \('.*--engine=tf_graph"
    with pytest.raises(LoweringError, match=said):
        xs.shard_function(function, mesh=_MESH)(tf.ones([16, 8]), tf.ones([8]))
    in_fprop(function)
    assert _train(tmp_path, "--mesh=data:8", "--num_devices=8") == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ") and re.search(said, last)


def _out_of_range(x, w):
    return tf.gather(tf.stop_gradient(w), tf.cast(x, tf.int32) + 100) + w  # here


def _not_finite(x, w):
    return tf.debugging.check_numerics(tf.math.log(x * 0 - 1), "the logarithm") + w  # here


@pytest.mark.parametrize("function, message", [
    (_out_of_range, r"indices\[.*\] = \d+ is not in \[0, 8\) \(operation 'line/GatherV2'\)"),
    (_not_finite, r"the logarithm : Tensor had NaN values \(operation 'line/CheckNumerics'\)"),
])  # fmt: skip
def test_an_error_of_a_step_that_runs_has_the_user_s_line(
    function, message, in_fprop, tmp_path, capsys
):
    in_fprop(function)
    assert _train(tmp_path, "--engine=tf_graph", "--num_devices=1") == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.match(rf"error: {_place(function, '')}: {message}", last), last


def test_a_mistake_in_the_params_module_or_the_input_has_the_user_s_line(
    monkeypatch, tmp_path, capsys
):
    def Task(self):
        return toy_task.LinearModel.Params().Set(nam="line")  # here

    def Input(self):
        return {}["numbers"]  # here

    def BatchSpec(self):
        return NestedMap(x=self.p.rows)  # here

    def ConfigureInput(task, inputs):
        inputs.batch_siz = 8  # here

    for owner, function, message, path in (
        (toy_task.Line, Task, "AttributeError: no parameter 'nam' (did you mean 'name'?)", ""),
        (toy_task.Line, Input, "KeyError: 'numbers'", ""),
        (toy_task.Numbers, BatchSpec, "AttributeError: no parameter 'rows'", ""),
        (toy_task.LinearModel, ConfigureInput, "AttributeError: no parameter 'batch_siz' (did you", ""),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            wrapped = staticmethod(function) if function is ConfigureInput else function
            patch.setattr(owner, function.__name__, wrapped)
            assert _train(tmp_path, "--engine=tf_graph", "--num_devices=1") == 2
        said = capsys.readouterr().err
        assert f"error: {message}" in said
        assert re.search(f"^  {_place(function, path)}$", said, re.MULTILINE), said


def test_refusals_stay_one_line(tmp_path, capsys):
    for flag in ("--init_from=/no/such/run", "--data_dir=/no/such/data", "--mesh=data"):
        assert _train(tmp_path, "--engine=tf_graph", "--num_devices=1", flag) == 2
        said = capsys.readouterr().err.splitlines()
        assert said[-1].startswith("error: --") and not any("traceback" in line for line in said)
