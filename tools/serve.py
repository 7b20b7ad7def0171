"""Serves translations, or continuations of a language model, over HTTP, to programs and to people.

    python -m tools.serve --saved_model=DIR
    python -m tools.serve --logdir=RUN --port=8081

    curl http://127.0.0.1:8080/translate --json '{"text": "Guten Tag"}'

POST /translate takes {"text": "one line or several"} or {"text": ["line", ...]}, and for models that route by language
{"language": "de"}, or "eng_Latn-fra_Latn" where both are chosen. GET / is a page to try it, /health reports whether it
is ready, /metrics is for Prometheus, and /v1/models/NAME:predict accepts requests for TensorFlow Serving. A language
model has POST /generate instead: {"text": "a prompt", "max_tokens": 64, "stream": true} (docs/language_models.md), and
OpenAI's /v1/models, /v1/completions and /v1/chat/completions; its page is there if it has a chat template. Requests
that arrive at the same time are answered together. After Ctrl-C or SIGTERM it accepts no more requests, answers those
that run, and exits.

Only this machine can reach it unless --host says otherwise. It has no encryption and no passwords: on a network, put
a proxy that has both in front of it (docs/serving.md).
"""

import asyncio
import dataclasses
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NoReturn

from lingvo_moe.core.config import checks
from lingvo_moe.core.console.flags import Flags

from . import _cli, _mesh, _models, _published

_CONNECTIONS = checks.Integer(1, 2**16)  # each is an open file

_SIZES = {
    "max_body_bytes": "bytes of a request",
    "max_lines": "lines of a request",
    "max_line_chars": "characters of a line",
    "max_waiting_lines": "lines of all requests that wait; what exceeds them is answered with status 429",
    "max_connections": "open connections",
    "cache_mib": "MiB of keys and values of all texts of a running batch",
}
_TIMES = {
    "request_timeout": "to translate a request",
    "read_timeout": "for a client to send headers, to send a body, to take the answer, to come back",
    "shutdown_timeout": "for requests to end when the server is stopped",
}


def define_flags() -> Flags:
    flags = Flags("python -m tools.serve", __doc__)
    _cli.define_model_flags(flags)
    _published.define_from_flag(flags)
    flags.DEFINE_string("host", "127.0.0.1", "address to listen at; 127.0.0.1 is this machine only")
    flags.DEFINE_integer("port", 8080, "0 for any free port", checks.COUNT)
    flags.DEFINE_parsed(
        "server_names",
        None,
        "names besides localhost by which browsers or a proxy may call it, e.g. mt.example.org (default: any, where"
        " --host is not this machine only)",
        _server_names,
        "comma-separated",
    )
    help = "the model's name in /v1/models/NAME (default: translator; lm for a language model)"
    flags.DEFINE_parsed("name", None, help, _model_name)
    flags.DEFINE_integer(
        "max_batch_lines", None, "lines translated at once (default: the model's rows)", checks.SIZE
    )
    flags.DEFINE_float(
        "max_batch_wait_ms",
        5.0,
        "how long a first line waits for others when nothing runs",
        checks.NOT_NEGATIVE,
    )
    flags.DEFINE_boolean("quiet", False, "no line for each request")
    _define_limits(flags)
    _cli.define_search_flags(flags)
    _models.define_draft_flag(flags)
    _mesh.define_flags(flags)
    return flags


def _define_limits(flags: Flags) -> None:
    """Defines a flag for each of the server's limits, with the default that it has there."""
    from lingvo_moe.tasks.text.serving.limits import Limits

    defaults = Limits()
    with flags.Section("sizes that the server accepts"):
        for name, text in _SIZES.items():
            check = _CONNECTIONS if name == "max_connections" else checks.SIZE
            flags.DEFINE_integer(name, getattr(defaults, name), text, check)
    with flags.Section("time limits, in seconds"):
        for name, text in _TIMES.items():
            flags.DEFINE_float(name, getattr(defaults, name), text, checks.POSITIVE)


def _server_names(text: str) -> tuple[str, ...]:
    names = _cli.names(text.lower())
    for name in names:
        if not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
            raise ValueError(f"{name!r} must be a host's name alone, e.g. mt.example.org")
    return names


def _model_name(text: str) -> str:
    if not text.replace("-", "").replace("_", "").isalnum():
        raise ValueError("must have letters, digits, - and _ only: it is part of a URL's path")
    return text


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    if args.max_waiting_lines < args.max_lines:
        args.Fail(
            f"--max_waiting_lines={args.max_waiting_lines}: must be at least --max_lines, {args.max_lines},"
            " or the largest requests would never be taken"
        )
    return _mesh.attempt("serve", lambda: _run(args))


def _run(args: Flags) -> int:
    if find_spec("tornado") is None:
        raise ValueError("tornado is not installed: pip install 'lingvo_moe[serve]'")
    from lingvo_moe.tasks.text.serving import server
    from lingvo_moe.tasks.text.serving.limits import Limits
    from lingvo_moe.tasks.text.serving.service import Service

    sockets = [] if _mesh.follows(args) else server.bind(args.host, args.port)
    _mesh.load_tensorflow(args)
    _published.imported(args)
    is_lm = _models.is_language_model(args)
    translator, about = _models.open_generator(args) if is_lm else _models.open_translator(args)
    about |= getattr(translator, "about", {})
    values = {f.name: getattr(args, f.name) for f in dataclasses.fields(Limits)}
    if args.server_names is None and server.is_loopback(sockets):
        values["server_names"] = ()
    limits = Limits(**values)
    _start_log(args.quiet)

    name = args.name or ("lm" if is_lm else "translator")

    async def serve() -> int:
        service = Service(
            translator, shown(about), limits, args.max_batch_lines, args.max_batch_wait_ms / 1000
        )
        stop = asyncio.Event()
        server.stop_on_signals(stop)
        return await server.serve(service, sockets, name, stop)

    return asyncio.run(serve())


def shown(about: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a model's description that `/health` shows."""
    names = {"model": "model", "step": "step", "trained_languages": "languages"}
    return {new: about[name] for name, new in names.items() if name in about}


def _start_log(quiet: bool) -> None:
    """Logs to standard error, with the time of each line; `quiet` leaves out the requests."""
    log = logging.getLogger("lingvo_moe.serve")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)
    log.getChild("requests").setLevel(logging.WARNING if quiet else logging.INFO)


def _serve_and_exit() -> NoReturn:
    """Ends the process right after `main`: an interrupted batch runs on in its thread, and cannot be stopped."""
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _cli.run(_serve_and_exit)
