"""Checkpoints that the `transformers` library wrote give its logits and its greedy tokens once they are imported.

benchmarks/peers/record_published.py made the files in testdata/.
"""

import importlib.util
import json
import random
import shutil

import numpy as np
import pytest
from equivalence import assert_same
from imported import TESTDATA, assert_as_recorded, change, load_imported, set_config
from published import tensors_of

from lingvo_moe.core.engine.checkpoints import streamed
from lingvo_moe.core.files.store import Bucket
from lingvo_moe.core.weights.gguf_file import GgufFile
from lingvo_moe.core.weights.open_source import open_source, state_of
from lingvo_moe.core.weights.safetensors_file import open_safetensors, write_safetensors
from lingvo_moe.core.weights.source import Entry, WeightsError
from lingvo_moe.tasks.families.family import FAMILIES
from lingvo_moe.tasks.families.importing import (
    import_checkpoint,
    open_published,
    published_model,
)
from lingvo_moe.tasks.families.llama_gguf import LlamaGguf, gguf_tokenizer
from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.runs.run_dir import TextRunDir
from lingvo_moe.tasks.text.runs.weights import load_theta
from tools import import_checkpoint as import_checkpoint_command

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tokenizers") is None,
    reason="needs tokenizers: pip install --no-deps -r requirements-tokenizers.txt",
)

NAMES = [
    *("llama3", "llama4_interleaved", "llama_tied", "mistral", "mixtral", "qwen3"),
    # Experts that are square and not symmetric, where no shape tells that one is transposed: Megatron-Bridge #3743,
    # huggingface/transformers#47031.
    *("llama4", "olmoe", "qwen3_moe"),
    # With `olmoe` and `qwen3_moe`, gates that sum to one and gates that need not: pytorch/torchtitan#1448.
    *("olmoe_normalized", "qwen3_moe_sparse"),
]
GGUF = TESTDATA / "llama_tied.gguf"


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens(name, checkpoint, tmp_path):
    model, theta = load_imported(checkpoint(name), tmp_path / "run")
    assert_as_recorded(model, theta, name)


def test_two_gates_that_are_equal_in_bfloat16_are_told_apart(checkpoint, tmp_path):
    """The case of huggingface/optimum-onnx#64: the two best experts are those of float32."""
    directory, name = checkpoint("olmoe"), "model.layers.0.mlp.gate.weight"
    rounded = {}

    def round_gates(tensors):
        rounded[name] = tensors[name].astype("bfloat16").astype(np.float32)
        return tensors | rounded

    assert (open_safetensors(directory / "model.safetensors").Read(name)[0] != 0).all()
    change(directory, round_gates)
    np.testing.assert_array_equal(rounded[name][0], rounded[name][1])
    model, theta = load_imported(directory, tmp_path / "run")
    with pytest.raises(AssertionError, match="Mismatched elements"):
        assert_as_recorded(model, theta, "olmoe")


def test_the_text_part_of_llama_4_is_taken(checkpoint, tmp_path):
    directory = checkpoint("llama4")
    _, whole = load_imported(directory, tmp_path / "whole")
    text = json.loads((directory / "config.json").read_text())
    config = {"model_type": "llama4", "text_config": text, "vision_config": {"hidden_size": 3}}
    (directory / "config.json").write_text(json.dumps(config))
    image = {"vision_model.class_embedding": np.zeros(3, np.float32)}
    change(directory, lambda t: {f"language_model.{n}": x for n, x in t.items()} | image)
    published = open_published(directory)
    left_out = import_checkpoint(published, tmp_path / "run", lambda line: None)
    assert left_out == list(image)
    opened = TextRunDir(tmp_path / "run")
    assert_same(load_theta(opened, opened.Task())[0], whole)


CHANGES = {
    "lacks model.layers.1.mlp.up_proj.weight$": lambda t: {
        n: x for n, x in t.items() if n != "model.layers.1.mlp.up_proj.weight"
    },
    "has no place for model.layers.3.mlp.up_proj.weight$": lambda t: (
        t | {"model.layers.3.mlp.up_proj.weight": t["model.layers.0.mlp.up_proj.weight"]}
    ),
    r"model.layers.0.mlp.up_proj.weight has the shape \[24, 20\]; the model needs \[20, 24\]": lambda t: (
        t | {"model.layers.0.mlp.up_proj.weight": t["model.layers.0.mlp.up_proj.weight"].T.copy()}
    ),
    "model.norm.weight is of int8: integers of a kind": lambda t: (
        t | {"model.norm.weight": t["model.norm.weight"].astype("int8")}
    ),
    "weight is of float8_e4m3fn, and has 0 tensors of scales": lambda t: (
        t | {"model.norm.weight": t["model.norm.weight"].astype("float8_e4m3fn")}
    ),
}


@pytest.mark.parametrize("message", CHANGES)
def test_other_tensors_are_refused_by_name_and_nothing_is_written(message, checkpoint):
    directory = checkpoint("llama_tied")
    change(directory, CHANGES[message])
    with pytest.raises(WeightsError, match=message):
        import_checkpoint(open_published(directory), directory / "run", lambda line: None)
    assert not (directory / "run").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("hidden_act", "gelu"), ("sliding_window", 4), ("new", 1), ("rope_interleaved", True)),
        *(("hidden_size", "24"), ("num_attention_heads", []), ("rope_scaling", "yarn")),
        *(
            ("rope_scaling", {"rope_type": "yarn"}),
            ("quantization_config", {"quant_method": "awq"}),
        ),
    ],
)
def test_a_config_that_cannot_be_represented_is_refused_by_its_key(key, value, checkpoint):
    directory = checkpoint("llama_tied")
    set_config(directory, rope_parameters=None, **{key: value})
    with pytest.raises(WeightsError, match=f"config.json: {key}="):
        open_published(directory)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama4", "no_rope_layers", [0, 1]),
        ("llama4", "moe_layers", [1, 2]),
        ("llama4", "layer_types", ["full_attention"] * 2),
        ("llama4", "num_experts_per_tok", 2),
        ("mistral", "sliding_window", 0),
        ("gpt_oss", "sliding_window", None),
        ("gpt_oss", "head_dim", None),
        ("gpt_oss", "attention_bias", None),
        ("olmoe", "clip_qkv", 8.0),
        ("qwen3", "layer_types", ["sliding_attention"] * 3),
        ("qwen3", "use_sliding_window", True),
        ("qwen3_moe", "mlp_only_layers", [1]),
        ("qwen3_moe", "num_experts_per_tok", 1),
    ],
)
def test_a_key_of_another_family_that_cannot_be_represented_is_refused(
    name, key, value, checkpoint, tmp_path
):
    directory = checkpoint(name)
    set_config(directory, **{key: value})
    with pytest.raises(WeightsError, match=rf"config.json: .*{key}="):
        open_published(directory)


@pytest.mark.parametrize("name", ["llama4", "mistral"])
def test_a_value_of_another_type_is_refused_or_without_effect(name, checkpoint):
    directory = checkpoint(name)
    whole = json.loads((directory / "config.json").read_text())
    messages = []
    for key in whole:
        for value in ("x", {"x": 0}, 0, 10**30):
            (directory / "config.json").write_text(json.dumps({**whole, key: value}))
            try:
                open_published(directory)
            except (WeightsError, DataError) as e:
                messages.append(str(e))
    assert len(messages) > 40
    assert all(str(directory) in text and "\n" not in text for text in messages)


@pytest.mark.parametrize("value", [0, -1, 2.5, 10**30, True])
@pytest.mark.parametrize(
    "key", ["hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size"]
)
def test_a_size_that_a_model_cannot_have_is_refused(key, value, checkpoint, tmp_path):
    directory = checkpoint("llama_tied")
    set_config(directory, **{key: value})
    with pytest.raises(WeightsError, match=f"config.json: {key}={value}|has the shape"):
        import_checkpoint(open_published(directory), tmp_path / "run", lambda line: None)
    assert not (tmp_path / "run").exists()


DEFAULTS = json.loads((TESTDATA / "defaults.json").read_text())


@pytest.mark.parametrize("kind", DEFAULTS)
def test_keys_that_are_left_out_have_the_library_s_values(kind):
    family, defaults = FAMILIES[kind], dict(DEFAULTS[kind])
    if defaults.get("num_experts_per_tok", 1) is None:  # deepseek_v2: of which no model can be made
        del defaults["num_experts_per_tok"]
    assert family.Overrides({}, "") == family.Overrides(defaults, "")


def test_two_scalings_of_positions_are_refused_unless_they_are_the_same():
    """An older key beside a newer one: the library takes the older, and leaves the other's base aside."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 9}
    family, plain = FAMILIES["llama"], {"rope_type": "default", "rope_theta": 5.0}
    with pytest.raises(WeightsError, match=r"rope_scaling=.*yarn.* and rope_parameters=.*default"):
        family.Overrides({"rope_scaling": yarn, "rope_parameters": plain}, "")
    both = family.Overrides({"rope_scaling": yarn, "rope_parameters": yarn}, "")
    assert both == family.Overrides({"rope_scaling": {**yarn, "mscale": 0}}, "")


def test_sizes_of_the_default_model_that_weights_do_not_have_are_refused(checkpoint, tmp_path):
    directory = checkpoint("llama_tied")
    (directory / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(WeightsError, match=r"has the shape|lacks"):
        import_checkpoint(open_published(directory), tmp_path / "run", lambda line: None)


def test_tensors_are_believed_where_config_says_that_they_are_tied(checkpoint, tmp_path):
    """The case of huggingface/transformers#45005: tie_word_embeddings is true, and a head differs."""
    directory = checkpoint("llama_tied")
    change(directory, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"] + 1})
    _, theta = load_imported(directory, tmp_path / "run")
    assert_same(theta.softmax.table, theta.embedding.table + 1)


def test_a_copy_of_the_embeddings_is_left_out_by_name(checkpoint, tmp_path):
    """torch.save writes the shared table by both of its names."""
    directory = checkpoint("llama_tied")
    change(directory, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"]})
    left_out = import_checkpoint(open_published(directory), tmp_path / "run", lambda line: None)
    assert left_out == ["lm_head.weight"]
    places = TextRunDir(tmp_path / "run").artifacts.about["imported"]["places"]
    assert places[-1] == ["lm_head.weight", "1", "[37, 24]", "float32", "888", "left out"]


def test_float8_with_its_scales_is_imported(checkpoint, tmp_path):
    name, directory = "model.layers.1.mlp.up_proj.weight", checkpoint("llama_tied")
    values = open_safetensors(directory / "model.safetensors").Read(name).astype("float8_e4m3fn")
    scale = np.full((1, 1), 1.5, np.float32)
    change(directory, lambda t: t | {name: values, f"{name}_scale_inv": scale})
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    set_config(directory, quantization_config=quantization)
    _, theta = load_imported(directory, tmp_path / "run")
    places = TextRunDir(tmp_path / "run").artifacts.about["imported"]["places"]
    row = ["model.layers.{layer}.mlp.up_proj.weight", "3", "[20, 24]", "float32, float8_e4m3fn"]
    assert [*row, "1,440", "ffn.wi"] in places
    expected = (values.astype(np.float32) * 1.5).astype("bfloat16").astype(np.float32)
    assert_same(theta.decoder.blocks.body.layers[0].ffn.wi[1], expected.T)


def test_a_gguf_has_the_logits_and_the_tokenizer_of_its_model(tmp_path):
    """Its queries and keys are ordered in another way, which no shape tells. A directory may have it alone."""
    (tmp_path / "package").mkdir()
    shutil.copy(GGUF, tmp_path / "package")
    assert published_model(tmp_path / "package") == published_model(GGUF)
    model, theta = load_imported(tmp_path / "package", tmp_path / "run")
    assert_as_recorded(model, theta, "llama_tied")
    vocabulary = TextRunDir(tmp_path / "run").OpenVocabularies().target
    assert vocabulary.Encode("ABAC") == [36, 5] and vocabulary.Decode([36, 5]) == "ABAC"
    assert (vocabulary.bos_id, vocabulary.eos_id) == (1, 2)


@pytest.mark.parametrize(("key", "value"), [
    *(("llama.rope.scaling.type", "linear"), ("llama.rope.scaling.factor", 4.0)),
    *(("llama.attention.key_length", 8), ("llama.new", 1), ("llama.embedding_length", [24])),
    *(("tokenizer.ggml.tokens", 5), ("tokenizer.ggml.bos_token_id", [1])),
])  # fmt: skip
def test_metadata_that_change_results_are_refused_by_name(key, value):
    file = GgufFile(GGUF)
    LlamaGguf(file), gguf_tokenizer(file)
    file.metadata[key] = value
    match = key.replace("embedding_length", "").rpartition(".")[2]
    with pytest.raises(WeightsError, match=f"{match}|has the sizes|mark bos"):
        LlamaGguf(file), gguf_tokenizer(file)


def test_damaged_ggufs_are_refused_with_a_line_or_are_other_models(tmp_path):
    content, rng, path = GGUF.read_bytes(), random.Random(0), tmp_path / "x.gguf"
    refused = 0
    for _ in range(100):
        at, piece = rng.randrange(2200), rng.randbytes(rng.randrange(1, 9))
        path.write_bytes(content[:at] + piece + content[at + len(piece) :])
        try:
            open_published(path)
        except (WeightsError, DataError) as e:
            message, refused = str(e), refused + 1
            assert "\n" not in message
    assert refused > 30


def test_a_directory_of_another_kind_is_left_alone(checkpoint, tmp_path, capsys):
    directory, output = checkpoint("llama_tied"), tmp_path / "mine"
    (output / "importing").mkdir(parents=True)
    (output / "importing" / "written.txt").write_text("mine")
    flags = [f"--from={directory}", f"--output={output}"]
    assert import_checkpoint_command.main(flags) == 1
    assert "holds 'importing', which is no part of a run" in capsys.readouterr().err
    assert (output / "importing" / "written.txt").read_text() == "mine"


def test_the_command_goes_on_where_it_was_interrupted(checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(streamed, "_AT_ONCE", 1)
    monkeypatch.setattr(
        streamed, "_DIGESTED", 1
    )  # so that digests are of files that were written before the end, too
    directory, run, tensors = checkpoint("llama_tied"), tmp_path / "run", []
    written = streamed.StreamedCheckpoint.Written

    def interrupted(self, name):
        if tensors and len(tensors) % 8 == 0:
            tensors.append("")
            raise KeyboardInterrupt
        tensors.append(name)
        written(self, name)

    monkeypatch.setattr(streamed.StreamedCheckpoint, "Written", interrupted)
    flags = [f"--from={directory}", f"--output={run}"]
    assert [import_checkpoint_command.main(flags) for _ in range(4)] == [130, 130, 130, 0]
    names = [name for name in tensors if name]
    assert len(names) == len(set(names)) == 29
    monkeypatch.undo()
    _, whole = load_imported(directory, tmp_path / "whole")
    opened = TextRunDir(run)
    assert_same(load_theta(opened, opened.Task())[0], whole)
    assert "import_checkpoint: run it again to go on" in capsys.readouterr().err
    assert import_checkpoint_command.main(flags) == 1
    assert "there is a run already" in capsys.readouterr().err


def test_an_import_whose_source_was_changed_meanwhile_begins_again(
    checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setattr(streamed, "_AT_ONCE", 1)
    directory, run = checkpoint("llama_tied"), tmp_path / "run"

    def interrupted(line):
        if line.startswith("tensor 9 "):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_checkpoint(open_published(directory), run, interrupted)
    first = json.loads((run / "experiment.json").read_text())["input"]["imported"]["digest"]
    change(directory, lambda tensors: {name: x + 1 for name, x in tensors.items()})
    _, theta = load_imported(directory, run)
    _, whole = load_imported(directory, tmp_path / "whole")
    assert_same(theta, whole)
    about = TextRunDir(run).artifacts.about["imported"]
    assert about["digest"] == first  # names and shapes are as before
    set_config(directory, rms_norm_eps=0.5)
    load_imported(directory, tmp_path / "other")
    assert TextRunDir(tmp_path / "other").artifacts.about["imported"]["digest"] != first


def test_a_directory_in_a_bucket_is_read_in_ranges(checkpoint, tmp_path, monkeypatch, capsys):
    directory, bucket = checkpoint("mixtral"), Bucket(f"memory://models/{tmp_path.name}")
    tensors = tensors_of(directory)
    halves = {"a.safetensors": list(tensors)[::2], "b.safetensors": list(tensors)[1::2]}
    (directory / "model.safetensors").unlink()
    for file, names in halves.items():
        entries = {name: Entry(tensors[name].shape, str(tensors[name].dtype)) for name in names}
        with open(directory / file, "wb") as opened:
            write_safetensors(opened, entries, [tensors[name] for name in names])
    index = {"weight_map": {name: file for file, names in halves.items() for name in names}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    for path in directory.iterdir():
        bucket.Write(path.name, path.read_bytes())

    read, whole = [], Bucket.Version
    one_range = Bucket.Range

    def ranges(self, name, begin, end):
        read.append((name, begin, end))
        return one_range(self, name, begin, end)

    def version(self, name):
        assert not name.endswith("safetensors"), f"{name} is read whole"
        return whole(self, name)

    monkeypatch.setattr(Bucket, "Range", ranges)
    monkeypatch.setattr(Bucket, "Version", version)
    flags = [f"--from={bucket.address}", f"--output={tmp_path / 'run'}"]
    assert import_checkpoint_command.main(flags) == 0, capsys.readouterr().err
    run = TextRunDir(tmp_path / "run")
    assert_same(load_theta(run, run.Task())[0], load_imported(directory, tmp_path / "here")[1])
    assert run.artifacts.about["imported"]["from"] == bucket.address
    sizes = {file: (directory / file).stat().st_size for file in halves}
    asked = {file: sum(end - begin for name, begin, end in read if name == file) for file in halves}
    assert all(size <= asked[file] <= size + 4 for file, size in sizes.items())
    assert max(end - begin for _, begin, end in read) < min(sizes.values()) / 2
    assert published_model(bucket.address) == published_model(directory)

    before = state_of(bucket.address)
    bucket.Write("b.safetensors", (directory / "b.safetensors").read_bytes()[:-1])
    assert state_of(bucket.address) != before
    with pytest.raises(WeightsError, match=r"b.safetensors: its tensors end .* the file does not:"):
        open_source(bucket.address)
    bucket.Delete("b.safetensors")
    with pytest.raises(WeightsError, match=r"index.json: names b.safetensors, which is missing"):
        open_source(bucket.address)
    for name in ("a.safetensors", "model.safetensors.index.json"):
        bucket.Delete(name)
    bucket.Write("pytorch_model.bin", b"PK")
    with pytest.raises(
        WeightsError, match=r"pytorch_model.bin: from a bucket files of safetensors"
    ):
        open_source(bucket.address)
    with pytest.raises(WeightsError, match="there is no such directory in the bucket"):
        open_source("memory://models/none")
