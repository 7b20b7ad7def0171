"""A language model's server under load as users make it: requests come whether others are answered or not.

    python -m benchmarks.serve_load --logdir=RUN --data_dir=demo/corpus --rate=2 --seconds=60
    python -m benchmarks.serve_load --from=DIR --data_dir=demo/corpus --peer=PEERS/bin/python

Prompts are 1 to 8 held-out lines joined, and replies have 8 to 64 tokens at most. Requests arrive with independent
gaps (Poisson), and then, as many, in bursts of eight. Each asks for a stream; measured are the time to its first text,
and the gaps between texts. --peer is a Python with `transformers[serving]`, whose `transformers serve` gets the
requests of a published checkpoint at the same times afterwards, on the same cores.
"""

import contextlib
import http.client
import itertools
import json
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import psutil

from benchmarks.compile_time import host
from benchmarks.contenders import ROOT
from lingvo_moe.core.config import checks
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.pages.tables import Table, markdown, numbers, words
from lingvo_moe.tasks.text.data.dev_set import DevSet
from tools import _cli

_BURST = 8
_TIMEOUT = 300.0  # seconds, for a server to start, and for a text of a stream


@dataclass(frozen=True)
class Arrival:
    """A request: seconds after the start, its prompt, and how many tokens it asks for at most."""

    at: float
    prompt: str
    tokens: int


@dataclass
class Seen:
    """The answers that all clients of a server saw."""

    first: list[float] = field(default_factory=list)  # seconds to the first text of each answer
    gaps: list[float] = field(default_factory=list)  # seconds between two texts
    statuses: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def Add(self, status: str, times: Sequence[float], start: float) -> None:
        """A request that ended, whose texts came at these times."""
        with self.lock:
            self.statuses[status] += 1
            self.first += [time - start for time in times[:1]]
            self.gaps += [b - a for a, b in itertools.pairwise(times)]


def define_flags() -> Flags:
    """The command's flags."""
    flags = Flags("python -m benchmarks.serve_load", __doc__)
    flags.DEFINE_path("logdir", "", "a run of a language model", portable=True)
    flags.DEFINE_path("from", "", "or the directory of a published checkpoint")
    flags.DEFINE_path("data_dir", None, "the corpus whose held-out lines are sent", required=True)
    flags.DEFINE_float("rate", 1.0, "requests a second", checks.POSITIVE)
    flags.DEFINE_float(
        "seconds", 60.0, "for which requests arrive, in each pattern", checks.POSITIVE
    )
    flags.DEFINE_path("peer", "", "a Python with transformers[serving]")
    flags.OnlyWith("peer", "it serves published checkpoints", **{"from": True})
    flags.Refuse(
        ["logdir", "from"],
        lambda v: "give --logdir or --from, not both" * (bool(v["logdir"]) == bool(v["from"])),
    )
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    return _cli.attempt("serve_load", lambda: _run(args))


def _run(args: Flags) -> int:
    found = [source for _, pairs in DevSet(args.data_dir, 20).items() for source, _ in pairs]
    patterns = {
        name: arrivals(name, found, args.rate, args.seconds) for name in ("poisson", "bursts")
    }
    checkpoint = str(args["from"].value)
    port = _free_port()
    ours = [sys.executable, "-m", "tools.serve", f"--port={port}", "--quiet"]
    ours.append(f"--from={checkpoint}" if checkpoint else f"--logdir={args.logdir}")
    servers = {"tools.serve": (ours, "lm")}
    notes = []
    if args.peer and subprocess.run([args.peer, "-c", _HAS_PEER], check=False).returncode:
        notes.append(f"transformers serve is not there: {args.peer} lacks fastapi or uvicorn")
    elif args.peer:
        peer = [args.peer, "-m", "transformers.cli.transformers", "serve", "--port", str(port)]
        servers["transformers serve"] = ([*peer, checkpoint, "--device", "cpu"], checkpoint)
    rows = []
    for name, (command, model) in servers.items():
        with _started(command, port) as process:
            _ask(Seen(), port, model, Arrival(0, found[0], 8))  # which loads what is loaded late
            for pattern, requests in patterns.items():
                rows.append([name, pattern, *_measured(process, port, model, requests)])
    heads = (
        "requests",
        "statuses",
        "first text p50",
        "p99",
        "between p50",
        "p99",
        "texts/s",
        "CPU s",
    )
    print(f"{host()}; {args.rate:g} requests a second for {args.seconds:g} s", *notes, sep="\n")
    print(markdown(Table([*words("server", "arrivals"), *numbers(*heads)], rows)).rstrip())
    return 0


_HAS_PEER = "import fastapi, uvicorn, transformers"


def arrivals(pattern: str, lines: Sequence[str], rate: float, seconds: float) -> list[Arrival]:
    """The requests of a pattern, the same ones each time: as many a second, alone or in bursts."""
    rng, at, requests = random.Random(0), 0.0, []
    together = _BURST if pattern == "bursts" else 1
    while (at := at + rng.expovariate(rate / together)) < seconds:
        for _ in range(together):
            prompt = " ".join(rng.choices(lines, k=rng.choice((1, 1, 2, 4, 8))))
            requests.append(Arrival(at, prompt, rng.choice((8, 16, 32, 64))))
    return requests


def _measured(
    process: psutil.Process, port: int, model: str, requests: Sequence[Arrival]
) -> list[str]:
    """The cells of a row."""
    seen, start = Seen(), time.monotonic()
    cpu = _cpu_seconds(process)
    clients = []
    for request in requests:
        time.sleep(max(start + request.at - time.monotonic(), 0))
        clients.append(threading.Thread(target=_ask, args=(seen, port, model, request)))
        clients[-1].start()
    for client in clients:
        client.join()
    took, cpu = time.monotonic() - start, _cpu_seconds(process) - cpu
    statuses = ", ".join(f"{status}: {count}" for status, count in sorted(seen.statuses.items()))
    cells = [str(len(requests)), statuses]
    for values in (seen.first, seen.gaps):
        cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else []
        cells += [f"{1000 * cuts[i]:,.0f} ms" if cuts else "" for i in (49, 98)]
    return [*cells, f"{(len(seen.first) + len(seen.gaps)) / took:,.1f}", f"{cpu:.1f}"]


def _ask(seen: Seen, port: int, model: str, request: Arrival) -> None:
    """Sends a request, and reads its stream to the end."""
    body = {"model": model, "prompt": request.prompt, "max_tokens": request.tokens}
    body |= {"stream": True, "temperature": 0.0}
    start, times, status = time.monotonic(), [], ""
    try:
        with contextlib.closing(
            http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT)
        ) as to:
            headers = {"Content-Type": "application/json"}
            to.request("POST", "/v1/completions", json.dumps(body).encode(), headers)
            response = to.getresponse()
            status = str(response.status)
            for line in response:
                if line.startswith(b"data: {") and _text_of(json.loads(line[6:])):
                    times.append(time.monotonic())
    except (OSError, http.client.HTTPException, ValueError) as e:
        status = type(e).__name__
    seen.Add(status, times, start)


def _text_of(event: dict) -> str:
    return "".join(choice.get("text") or "" for choice in event.get("choices", ()))


@contextlib.contextmanager
def _started(command: Sequence[str], port: int) -> Iterator[psutil.Process]:
    """The process of a server that has answered a first request."""
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert process.stderr is not None
    said: list[bytes] = []
    reader = threading.Thread(target=lambda: said.extend(process.stderr or ()), daemon=True)
    reader.start()
    try:
        end = time.monotonic() + _TIMEOUT
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > end:
                tail = b"".join(said)[-2000:].decode("utf-8", "replace")
                raise ChildProcessError(f"{command[0]} does not serve: {tail}")
            time.sleep(0.5)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def _answers(port: int) -> bool:
    try:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as to:
            to.request("GET", "/health")
            return to.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False


def _cpu_seconds(process: psutil.Process) -> float:
    return sum(sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True)))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


if __name__ == "__main__":
    _cli.run(main)
