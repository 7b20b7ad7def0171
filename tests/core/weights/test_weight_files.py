"""Files of weights are read as their libraries read them, or refused: cut, damaged, or asking for more than tensors."""

import json
import pickle
import random
import struct
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from lingvo_moe.core.weights.gguf_file import GgufFile
from lingvo_moe.core.weights.open_source import open_source
from lingvo_moe.core.weights.quantized import Dequantized
from lingvo_moe.core.weights.safetensors_file import open_safetensors, write_safetensors
from lingvo_moe.core.weights.source import Entry, WeightsError, same_values
from lingvo_moe.core.weights.torch_file import open_torch

TESTDATA = Path(__file__).parent / "testdata"
FAMILIES = Path(__file__).parents[2] / "tasks/families/testdata"
TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.array(3, ml_dtypes.bfloat16),
    "c": np.zeros((0, 3), np.float16),
    "d": np.ones((4, 2), ml_dtypes.float8_e4m3fn),
}


def _write(path, tensors):
    entries = {name: Entry(x.shape, str(x.dtype)) for name, x in tensors.items()}
    with open(path, "wb") as file:
        write_safetensors(file, entries, tensors.values())
    return path


def _assert_equal(source, tensors):
    assert {n: (e.shape, e.dtype) for n, e in source.entries.items()} == {
        n: (x.shape, str(x.dtype)) for n, x in tensors.items()
    }
    for name, x in tensors.items():
        np.testing.assert_array_equal(source.Read(name), x)


def test_safetensors_are_read_back(tmp_path):
    source = open_safetensors(_write(tmp_path / "x.safetensors", TENSORS))
    _assert_equal(source, TENSORS)
    np.testing.assert_array_equal(source.Read("a", slice(1, 2)), TENSORS["a"][1:])
    with pytest.raises(WeightsError, match=r"has no tensor 'aa' \(did you mean 'a'\?\)"):
        source.Read("aa")


def test_values_of_each_type_of_gguf_are_those_of_its_library():
    source = GgufFile(TESTDATA / "blocks.gguf")
    expected = np.load(TESTDATA / "blocks.npz")
    assert set(expected) == set(source.entries)
    for name, values in expected.items():
        np.testing.assert_allclose(
            source.Read(name).astype(np.float32), values, rtol=1e-6, atol=1e-6
        )
    assert source.metadata["list"] == ["a", "\u00e9"] and source.metadata["number"] == 0.5


FILES = {
    ".safetensors": FAMILIES / "llama_tied/model.safetensors",
    ".bin": FAMILIES / "llama3/pytorch_model.bin",
    ".gguf": TESTDATA / "blocks.gguf",
}


@pytest.mark.parametrize("suffix", FILES)
def test_damage_is_refused_or_changes_values_alone(suffix, tmp_path):
    """Random bytes replaced, inserted or cut: an error by name, or the same tensors with other values."""
    content, rng = FILES[suffix].read_bytes(), random.Random(0)
    whole = {n: e.shape for n, e in open_source(FILES[suffix]).entries.items()}
    path, refused = tmp_path / f"x{suffix}", 0
    for _ in range(150):
        # Half of them where headers and indexes are.
        at = rng.choice([rng.randrange(len(content)), rng.randrange(2000), -rng.randrange(1, 2000)])
        at %= len(content)
        piece = rng.randbytes(rng.randrange(1, 9))
        damaged = rng.choice(
            [
                content[:at] + piece + content[at + len(piece) :],
                content[:at] + piece + content[at:],
                content[:at],
            ]
        )
        path.write_bytes(damaged)
        try:
            source = open_source(path)
        except WeightsError as e:
            message, refused = str(e), refused + 1
            assert str(path) in message and "\n" not in message and len(message) < 500
            continue
        assert len(source.entries) <= len(whole)
        with np.errstate(all="ignore"):
            for name, entry in source.entries.items():
                assert source.Read(name).shape == entry.shape
    assert refused > 50


class Called:
    """An object that would run a command when it is unpickled."""

    def __reduce__(self):
        return exec, ("raise SystemExit('executed')",)


def _torch_file(path, content, storages=()):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", content)
        for key, values in storages:
            archive.writestr(f"x/data/{key}", values)
    return path


def _tensor(size=4, shape=(2, 2), strides=(2, 1), offset=0):
    """The operations of a tensor "w" in a storage that claims `size` floats; protocol 2, as torch writes it."""

    def number(n):
        return b"J" + struct.pack("<i", n)

    def numbers(values):
        return b"(" + b"".join(map(number, values)) + b"t"

    def text(t):
        return b"X" + struct.pack("<I", len(t)) + t.encode()

    storage = (
        b"("
        + text("storage")
        + b"ctorch\nFloatStorage\n"
        + text("0")
        + text("cpu")
        + number(size)
        + b"tQ"
    )
    hooks = b"ccollections\nOrderedDict\n)R"
    call = (
        b"("
        + storage
        + number(offset)
        + numbers(shape)
        + numbers(strides)
        + b"\x89"
        + hooks
        + b"tR"
    )
    return b"\x80\x02}" + text("w") + b"ctorch._utils\n_rebuild_tensor_v2\n" + call + b"s."


FOUR = np.arange(4, dtype=np.float32)


def test_a_tensor_of_torch_is_read_and_one_that_lies_is_not(tmp_path):
    path = tmp_path / "x.bin"
    good = open_torch(_torch_file(path, _tensor(), [("0", FOUR.tobytes())]))
    np.testing.assert_array_equal(good.Read("w"), FOUR.reshape(2, 2))
    refusals = {
        "16 bytes, of which there are 8 bytes": (_tensor(), FOUR[:2]),  # CVE-2026-24747
        "16 bytes, of which there are no bytes": (_tensor(), None),
        "ends behind its storage": (_tensor(shape=(3, 2), strides=(2, 1)), FOUR),
        "are not in order": (_tensor(strides=(1, 2)), FOUR),
        "a damaged tensor": (_tensor(offset=-1), FOUR),
    }
    for message, (content, values) in refusals.items():
        storages = [] if values is None else [("0", values.tobytes())]
        with pytest.raises(WeightsError, match=message):
            open_torch(_torch_file(path, content, storages))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            pickle.dumps({"w": Called()}, 2),
            "a call of",
        ),  # CVE-2025-32434 was one way to such a call
        (pickle.dumps({"w": Called()}, 5), "a call of"),
        (pickle.dumps([1], 2), "the operation EMPTY_LIST"),
        (pickle.dumps({"w": 1}, 2), "'w', which is no tensor"),
        (
            b"\x80\x02)X\x01\x00\x00\x00aK\x01s.",
            "items of tuple, which is no dict",
        ),  # CVE-2026-24747
        (b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.", "a call of _Global"),
    ],
)
def test_a_file_of_torch_that_asks_for_more_is_refused_and_not_executed(content, message, tmp_path):
    with pytest.raises(WeightsError, match=message):
        open_torch(_torch_file(tmp_path / "x.bin", content))


def test_float8_is_scaled_by_blocks_of_which_the_last_are_smaller(tmp_path):
    """The case of modelscope/ms-swift#6851: 160 x 300 in blocks of 128."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(160, 300)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(0.5, 2, (2, 3)).astype(np.float32)
    path = _write(tmp_path / "x.safetensors", {"m.weight": values, "m.weight_scale_inv": scales})
    source = Dequantized(open_safetensors(path))
    expected = values.astype(np.float32) * np.kron(scales, np.ones((128, 128)))[:160, :300]
    assert list(source.entries) == ["m.weight"] and source.entries["m.weight"].dtype == "bfloat16"
    for rows in (slice(None), slice(120, 140)):
        read = source.Read("m.weight", rows).astype(np.float32)
        np.testing.assert_allclose(read, expected[rows], rtol=2**-8)
    without = open_safetensors(
        _write(tmp_path / "y.safetensors", {"m.weight": values, "m.other": scales})
    )
    with pytest.raises(
        WeightsError, match=r"m.weight is of float8_e4m3fn.*expected one, m.weight_scale_inv"
    ):
        Dequantized(without)
    bits = {"m.weight": values, "m.scale": np.full((2, 3), 127, np.uint8)}
    with pytest.raises(WeightsError, match=r"m\.scale is of uint8; expected scales of float32"):
        Dequantized(open_safetensors(_write(tmp_path / "z.safetensors", bits)))


def test_mxfp4_has_the_low_half_of_a_byte_first_and_is_transposed(tmp_path):
    blocks = np.zeros((2, 3, 1, 16), np.uint8)
    blocks[1, 2, 0, 0] = 0xF1  # 0.5, then -6
    scales = np.full((2, 3, 1), 127, np.uint8)
    scales[1, 2, 0] = 129
    path = _write(tmp_path / "x.safetensors", {"w_blocks": blocks, "w_scales": scales})
    w = Dequantized(open_safetensors(path)).Read("w").astype(np.float32)
    assert (
        w.shape == (2, 32, 3) and w[1, :2, 2].tolist() == [2.0, -24.0] and np.count_nonzero(w) == 2
    )


@pytest.mark.parametrize(("name", "shape"), [
    *(("w_blocks", shape) for shape in [(16,), (3, 16), (2, 3, 16), (), (2, 3, 1, 15)]),
    *(("w.weight", shape) for shape in [(), (200,), (2, 130, 130)]),
])  # fmt: skip
def test_values_of_few_bits_that_are_no_matrices_are_refused(name, shape, tmp_path):
    blocks = name.endswith("blocks")
    other, of_scales = "w_scales" if blocks else "w.scale", [-(-n // 128) for n in shape]
    scales = np.ones(shape[:-1] if blocks else of_scales, np.uint8 if blocks else np.float32)
    values = np.ones(shape, np.uint8 if blocks else ml_dtypes.float8_e4m3fn)
    source = open_safetensors(_write(tmp_path / "x.safetensors", {name: values, other: scales}))
    with pytest.raises(WeightsError, match="has the shape"):
        Dequantized(source)


def test_headers_that_say_more_than_there_is_cost_nothing(tmp_path):
    path = tmp_path / "x.safetensors"

    def write(**about):
        about = {"shape": [2**70, 0], "data_offsets": [0, 0]} | about
        header = json.dumps({"a": about, "b": about}).encode()
        path.write_bytes(struct.pack("<Q", len(header)) + header)

    write(dtype="F32")
    assert same_values(open_safetensors(path), "a", "b")
    write(dtype=["F32"])
    with pytest.raises(WeightsError, match=r"values of the type \['F32'\]"):
        open_safetensors(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda d: (d / "2.safetensors").unlink(),
            "names 2.safetensors, which is missing",
        ),  # sglang PR#32279
        (
            lambda d: _write(d / "2.safetensors", {"x": FOUR}),
            "says that b is in 2.safetensors, which has no",
        ),
        (
            lambda d: _write(d / "2.safetensors", {"b": FOUR, "x": FOUR}),
            "does not say that x is in 2.safetensors",
        ),
    ],
)
def test_an_index_and_its_files_agree(change, message, tmp_path):
    _write(tmp_path / "1.safetensors", {"a": FOUR})
    _write(tmp_path / "2.safetensors", {"b": FOUR})
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    _assert_equal(open_source(tmp_path), {"a": FOUR, "b": FOUR})
    change(tmp_path)
    with pytest.raises(WeightsError, match=message):
        open_source(tmp_path)


def test_an_index_names_no_file_elsewhere(tmp_path):
    index = {"weight_map": {"a": "../1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        WeightsError, match=r"names the file '\.\./1\.safetensors', which is not beside it"
    ):
        open_source(tmp_path)
