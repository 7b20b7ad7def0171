"""Serves translations over HTTP, to programs and to people.

    python -m tools.serve --saved_model=DIR
    python -m tools.serve --logdir=RUN --port=8081

    curl http://127.0.0.1:8080/translate --json '{"text": "Guten Tag"}'

POST /translate takes {"text": "one line or several"} or {"text": ["line", ...]}, and for models that route by
language {"language": "de"}. GET / is a page to try it, /health says when it is ready, /metrics is for Prometheus,
and /v1/models/NAME:predict takes what clients of TensorFlow Serving send. Requests that come at the same time are
translated together. Ctrl-C or SIGTERM: takes nothing more, ends what runs, exits.

Only this machine can reach it unless --host says otherwise. It has no encryption and no passwords: on a network, put
a proxy in front of it that has (docs/serving.md).
"""

import argparse
import asyncio
import dataclasses
import logging
import os
import sys
from typing import Any

from lingvo_moe.core import checks
from tools import _cli

_CONNECTIONS = checks.Integer(1, 2**16)  # each is an open file

_GROUPS = {
    "what it takes": {
        "max_body_bytes": "of a request",
        "max_lines": "of a request",
        "max_line_chars": "of a line",
        "max_waiting_lines": "of all requests; more are told to come back",
        "max_connections": "open at once",
    },
    "how long things may take, in seconds": {
        "request_timeout": "to translate a request",
        "read_timeout": "for a client to send headers, to send a body, to take the answer, to come back",
        "shutdown_timeout": "for requests to end when the server is stopped",
    },
}


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    _check(parser, args)
    try:
        return _run(args)
    except (ValueError, OSError) as e:
        print(f"serve: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def make_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    from lingvo_moe.tasks.mt.serving.limits import Limits

    parser = _cli.Parser(prog="python -m tools.serve", description=__doc__)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument(
        "--saved_model", type=_cli.portable_path, metavar="DIR", help="what tools.export wrote"
    )
    model.add_argument(
        "--logdir", type=_cli.portable_path, metavar="RUN", help="a run, as given to the trainer"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen at (%(default)s: this machine alone)"
    )
    parser.add_argument("--port", type=int, default=8080, help="0 for any (%(default)s)")
    parser.add_argument(
        "--server_names",
        type=lambda text: _cli.names(text.lower()),
        help="besides localhost, by which browsers or a proxy may call it, e.g. mt.example.org (default: any where"
        " --host is not this machine alone)",
    )
    parser.add_argument(
        "--name", default="translator", help="the model's, in /v1/models/NAME (%(default)s)"
    )
    parser.add_argument(
        "--max_batch_lines", type=int, help="translated at once (default: the model's rows)"
    )
    parser.add_argument(
        "--max_batch_wait_ms",
        type=float,
        default=5,
        help="that a first line waits for others when nothing runs (%(default)s)",
    )
    parser.add_argument("--quiet", action="store_true", help="no line for each request")
    defaults = Limits()
    for title, flags in _GROUPS.items():
        group = parser.add_argument_group(title)
        for name, text in flags.items():
            default = getattr(defaults, name)
            group.add_argument(
                f"--{name}", type=type(default), default=default, help=f"{text} (%(default)s)"
            )
    _cli.add_search_flags(parser)
    return parser


def _check(parser: argparse.ArgumentParser, args: Any) -> None:
    sizes = dict.fromkeys(_GROUPS["what it takes"], 1)
    _cli.check_at_least(parser, args, port=0, max_batch_lines=1, max_batch_wait_ms=0, **sizes)
    _cli.check_numbers(parser, args, max_connections=_CONNECTIONS)
    seconds = dict.fromkeys(_GROUPS["how long things may take, in seconds"], checks.POSITIVE)
    _cli.check_numbers(parser, args, **seconds)
    if args.max_waiting_lines < args.max_lines:
        parser.error(
            f"--max_waiting_lines={args.max_waiting_lines}: must be at least --max_lines, {args.max_lines},"
            " or the largest requests would never be taken"
        )
    for name in args.server_names or ():
        if not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
            parser.error(f"--server_names={name}: a name alone, e.g. mt.example.org")
    if not args.name.replace("-", "").replace("_", "").isalnum():
        parser.error(f"--name={args.name}: letters, digits, - and _ only, for it is part of a path")


def _run(args: Any) -> int:
    from lingvo_moe.tasks.mt.serving import server
    from lingvo_moe.tasks.mt.serving.limits import Limits
    from lingvo_moe.tasks.mt.serving.service import Service

    sockets = server.bind(args.host, args.port)
    _cli.load_tensorflow()
    translator, about = _cli.open_translator(args)
    about |= getattr(translator, "about", {})
    if args.server_names is None and server.is_loopback(sockets):
        args.server_names = ()
    limits = Limits(**{f.name: getattr(args, f.name) for f in dataclasses.fields(Limits)})
    _start_log(args.quiet)

    async def serve() -> int:
        service = Service(
            translator,
            {name: about[name] for name in ("model", "step") if name in about},
            limits,
            args.max_batch_lines,
            args.max_batch_wait_ms / 1000,
        )
        stop = asyncio.Event()
        server.stop_on_signals(stop)
        return await server.serve(service, sockets, args.name, stop)

    return asyncio.run(serve())


def _start_log(quiet: bool) -> None:
    """What the server says goes to standard error, with the time; `quiet` leaves out the requests."""
    log = logging.getLogger("lingvo_moe.serve")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)
    log.getChild("requests").setLevel(logging.WARNING if quiet else logging.INFO)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a batch that was cut off goes on in its thread, and cannot be stopped
