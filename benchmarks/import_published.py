"""Imports of checkpoints of the largest published models, which are killed and gone on with: memory and speed.

    python -m benchmarks.import_published --scratch=/tmp/import --model=deepseek_v3
    python -m benchmarks.import_published --scratch=/tmp/import --model=random_1b

Makes a directory with the files of the model at their true sizes, sparse, so that they take no disk: DeepSeek-V3 in
float8 with its head for the token after the next, 163 files; or Mixtral-8x22B in bfloat16, 59 files. It is imported for
some seconds, killed, and imported on for as long. Reports the peak memory of the process beyond that of one which loads
the same libraries and opens the same files, and bytes written in a second, and in one of the CPU, once it reads
tensors, beside those of cp of a file of random bytes. What was written is deleted.

random_1b is a Mixtral of two layers whose values are random: 1.7 GB in bfloat16. It is imported whole, in turn with cp
of the run that came of it, both up to the end of fsync of all files.
"""

import contextlib
import json
import math
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lingvo_moe.core.config import checks, registry
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.weights.source import Entry

RANDOM = "random_1b"
MODELS = ("deepseek_v3", "mixtral_8x22b", RANDOM)
_SHARD = 4 << 30
_CODES = {"float32": "F32", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3"}
_YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
_CONFIGS: Mapping[str, dict[str, Any]] = {
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "num_nextn_predict_layers": 1,
        "rope_scaling": {
            **_YARN,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1,
            "mscale_all_dim": 1,
        },
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    },
    "mixtral_8x22b": {
        "model_type": "mixtral",
        "vocab_size": 32768,
        "hidden_size": 6144,
        "intermediate_size": 16384,
        "num_hidden_layers": 56,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
    },
}
_CONFIGS = {
    **_CONFIGS,
    RANDOM: {
        **_CONFIGS["mixtral_8x22b"],
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
}
# Names of DeepSeek-V3's tensors that are matrices, and not in float8.
_PLAIN = ("embed_tokens", "lm_head", "mlp.gate.", "eh_proj", "shared_head")


@dataclass(frozen=True)
class Run:
    """A process that was killed or ended."""

    peak: int  # bytes of memory
    seconds: float  # since the first tensor
    cpu: float  # seconds of the CPU in this time
    written: int  # bytes of the checkpoint so far
    first: int  # the number of the first tensor


def main() -> None:
    flags = Flags("python -m benchmarks.import_published", __doc__)
    flags.DEFINE_path("scratch", None, "a directory for all files, which is made", required=True)
    flags.DEFINE_enum("model", MODELS[0], MODELS, "the model")
    flags.DEFINE_integer(
        "seconds",
        60,
        "how long each of the two imports may take, once it reads tensors",
        checks.SIZE,
    )
    flags.DEFINE_integer("gigabytes", 16, "how much may be written", checks.SIZE)
    flags.DEFINE_integer("rounds", 3, "how often random_1b is imported", checks.SIZE)
    flags.OnlyWith("rounds", model=RANDOM)
    flags.OnlyWith("seconds gigabytes", "others are imported whole", model=MODELS[:-1])
    args = flags.Parse()
    scratch = Path(args.scratch)
    scratch.mkdir(parents=True)
    try:
        model, output = scratch / args.model, scratch / "run"
        make_checkpoint(args.model, model)
        if args.model == RANDOM:
            beside_cp(model, output, args.rounds)
            return
        alone = _opened(model)
        print(f"libraries and files opened: {alone / 2**20:,.0f} MiB", flush=True)
        for number in (1, 2):
            run = _imported(model, output, args.seconds, number * args.gigabytes * 10**9 // 2)
            print(
                f"import {number}: from tensor {run.first:,}; {(run.peak - alone) / 2**20:,.0f} MiB more at the peak; "
                f"{run.written / 1e9:.2f} GB in {run.seconds:.0f} s, {run.written / 1e6 / run.seconds:,.0f} MB/s, "
                f"{run.written / 1e6 / run.cpu:,.0f} MB/CPU-s",
                flush=True,
            )
        shutil.rmtree(output)
        print(f"cp: {_copied(scratch):,.0f} MB/s")
    finally:
        shutil.rmtree(scratch)


def beside_cp(model: Path, output: Path, rounds: int) -> None:
    """Imports a model whole, copies what came of it, and prints the seconds of both, and of the CPU."""
    for path in sorted(model.glob("*.safetensors")):
        _fill(path)
    _sync(model)
    for number in range(1, rounds + 1):
        run = _imported(model, output, math.inf, sys.maxsize)
        began = time.monotonic()
        _sync(output)
        imported = run.seconds + time.monotonic() - began
        began, before = time.monotonic(), os.times()
        copy = output.parent / "copy"
        subprocess.run(["cp", "-r", output, copy], check=True)
        _sync(copy)
        copied, cpu = time.monotonic() - began, sum(os.times()[2:4]) - sum(before[2:4])
        written = _written(output)
        print(
            f"round {number}: {written / 1e9:.2f} GB; import {imported:.1f} s, {run.cpu:.1f} s of the CPU, "
            f"{written / 1e6 / imported:,.0f} MB/s; cp {copied:.1f} s, {cpu:.1f} s of the CPU, "
            f"{written / 1e6 / copied:,.0f} MB/s; {copied / imported:.0%} of cp",
            flush=True,
        )
        shutil.rmtree(output)
        shutil.rmtree(copy)


def _fill(path: Path) -> None:
    """Writes random values over the zeros of a file of safetensors: of bfloat16, and finite."""
    rng = np.random.default_rng(0)
    with open(path, "r+b") as file:
        at = 8 + struct.unpack("<Q", file.read(8))[0]
        file.seek(at)
        while (left := path.stat().st_size - file.tell()) > 0:
            values = rng.integers(0, 1 << 16, min(left // 2, 1 << 24), np.uint16)
            file.write((values & 0xBFFF).tobytes())  # of an exponent that is no NaN's


def _sync(directory: Path) -> None:
    """Waits until all files of a directory are on the disk."""
    for path, _, names in os.walk(directory):
        for name in names:
            with open(os.path.join(path, name), "rb") as file:
                os.fsync(file.fileno())


def make_checkpoint(name: str, directory: Path) -> None:
    """Makes the directory of a model: its config.json, a tokenizer of one token, sparse files and their index."""
    directory.mkdir()
    config = _CONFIGS[name]
    (directory / "config.json").write_text(json.dumps(config))
    model = {"type": "WordLevel", "vocab": {"<unk>": 0, "<s>": 1, "</s>": 2}, "unk_token": "<unk>"}
    (directory / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    marks = {"bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(marks))
    shards, size = [dict[str, Entry]()], 0
    for tensor, entry in _entries(config).items():
        if size >= _SHARD:
            shards.append({})
            size = 0
        shards[-1][tensor] = entry
        size += _bytes(entry)
    file_of: dict[str, str] = {}
    for number, entries in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_sparse(directory / file, entries)
        file_of |= dict.fromkeys(entries, file)
    index = {"weight_map": file_of}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _entries(config: Mapping[str, Any]) -> dict[str, Entry]:
    """The tensors of a model, layer by layer, as it is published."""
    from lingvo_moe.tasks.families.family import FAMILIES

    registry.AllNames()  # imports the families
    family = FAMILIES[config["model_type"]]
    values = family.Overrides(config, "config.json")
    if config.get("num_nextn_predict_layers"):
        values["task.multi_token_weight"] = 0.3
    override = ";".join(f"{key}={registry.escape(str(v))}" for key, v in values.items())
    p = registry.GetParams(family.EXPERIMENT, override).task
    mapping = family.Mapping(p, p.Instantiate().VariableSpecs())
    shapes = {name: mapping.Shape(name) for name in mapping.tensors}
    shapes |= {copy: shapes[name] for copy, name in family.Copies(p).items()}
    entries = {}
    for name, shape in sorted(shapes.items(), key=lambda item: _layer(item[0])):
        entries[name] = Entry(shape, "bfloat16")
        if "quantization_config" not in config:
            continue
        if len(shape) == 2 and not any(part in name for part in _PLAIN):
            blocks = tuple(-(-n // 128) for n in shape)
            entries |= {name: Entry(shape, "float8_e4m3fn")}
            entries[f"{name}_scale_inv"] = Entry(blocks, "float32")
        elif name.endswith("e_score_correction_bias"):
            entries[name] = Entry(shape, "float32")
    return entries


def _layer(name: str) -> int:
    number = name.removeprefix("model.layers.").partition(".")[0]
    return int(number) if number.isdigit() else -1


def _bytes(entry: Entry) -> int:
    return math.prod(entry.shape) * np.dtype(entry.dtype).itemsize


def _write_sparse(path: Path, entries: Mapping[str, Entry]) -> None:
    """Writes a file of safetensors whose values are a hole: zeros."""
    header, end = {}, 0
    for name, entry in entries.items():
        begin, end = end, end + _bytes(entry)
        about = {"dtype": _CODES[entry.dtype], "shape": entry.shape, "data_offsets": [begin, end]}
        header[name] = about
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def _opened(model: Path) -> int:
    """The peak memory of a process that loads TensorFlow and opens a checkpoint."""
    code = (
        "from tools import _cli; _cli.load_tensorflow()\n"
        "import sys\nfrom lingvo_moe.core.engine.checkpoints import streamed\n"
        "from lingvo_moe.tasks.families.importing import open_published\n"
        "published = open_published(sys.argv[1])\n"
        "published.params.task.Instantiate().VariableSpecs()\n"
        "print([line for line in open('/proc/self/status') if 'VmHWM' in line][0].split()[1])"
    )
    command = [sys.executable, "-c", code, str(model)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1]) << 10


def _imported(model: Path, output: Path, seconds: float, most: int) -> Run:
    """Imports until a time has passed, or so many bytes are there, and kills the process; or to its end."""
    command = [sys.executable, "-m", "tools.import_checkpoint", f"--from={model}"]
    log, before = output.parent / "log.txt", _written(output)
    peak, since, cpu, so_far = 0, None, 0.0, 0.0
    with open(log, "wb") as file:
        process = subprocess.Popen([*command, f"--output={output}"], stdout=file, stderr=file)
    try:
        while process.poll() is None and _written(output) < most:
            if since is None and b"tensor " in log.read_bytes():
                since, cpu = time.monotonic(), _cpu(process.pid)
            if since is not None and time.monotonic() > since + seconds:
                break
            with contextlib.suppress(FileNotFoundError):  # it ends here
                peak, so_far = max(peak, _peak(process.pid)), _cpu(process.pid)
            time.sleep(0.1)
        ended, cpu = time.monotonic(), so_far - cpu
    finally:
        process.kill()
        process.wait()
    if since is None or process.returncode not in (0, -signal.SIGKILL):
        raise SystemExit(log.read_text())
    first = log.read_text().partition("tensor ")[2].split()[0].replace(",", "")
    return Run(peak, ended - since, cpu, _written(output) - before, int(first))


def _peak(pid: int) -> int:
    """The peak memory of a process, in bytes; 0: it has ended."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def _cpu(pid: int) -> float:
    """The seconds of the CPU that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def _written(directory: Path) -> int:
    """The bytes of all files in a directory."""
    total = 0
    for path, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(path, name)).st_size
            except FileNotFoundError:  # renamed meanwhile
                continue
    return total


def _copied(scratch: Path, size: int = 2 * 10**9) -> float:
    """MB/s of cp, to the disk."""
    source, target = scratch / "source", scratch / "target"
    with open(source, "wb") as file:
        for _ in range(size // 10**7):
            file.write(os.urandom(10**7))
        os.fsync(file.fileno())
    began = time.monotonic()
    subprocess.run(["cp", source, target], check=True)
    with open(target, "rb") as file:
        os.fsync(file.fileno())
    return size / 1e6 / (time.monotonic() - began)


if __name__ == "__main__":
    main()
