"""Says how a program's tensors are cut, what is sent for it, and which line of code asked for that.

    python -m tools.explain --model=mt.M4Tiny
    python -m tools.explain --model=mt.M4Demo --mesh=expert:4 --html=explain.html --json=explain.json
    python -m tools.explain --program=train_step.program
    python -m tools.explain --model=mt.M4Tiny --tensor=m4.encoder.blocks.body.layers_1.ffn.dispatcher

The step is the trainer's own, compiled for virtual CPU devices by XLA, whose sharding propagation and
SPMD partitioner decide all of it; nothing is run. A program file, as `Program.Save` writes it, names
no lines.
Ends with status 0, 1 or (in flags) 2 for a mistake, 130 where it was interrupted.
"""

import json
import os
from typing import Any

from lingvo_moe.core import checks
from lingvo_moe.trainer_checks import MOST_DEVICES
from tools import _cli


def make_parser() -> _cli.Parser:
    """The flags."""
    parser = _cli.Parser(prog="python -m tools.explain", description=__doc__)
    add = parser.add_argument
    add("--model", default="", help="experiment whose training step to explain, e.g. mt.M4Tiny")
    add("--program", type=_cli.local_path, default="", help="a program file to explain instead")
    add("--mesh", default="", help="axis:size,... (default: the experiment's own)")
    add("--num_devices", type=int, help="lay the experiment's mesh over so many (default: 8)")
    add("--topology", default="", help="compile for a TPU slice that need not be there: v3:2x2")
    add("--model_params_override", default="", help="path=value;path=value, as for the trainer")
    add(
        "--tensor",
        default="",
        help="names of tensors, layers or scopes, comma-separated: show these",
    )
    add("--html", type=_cli.local_path, default="", help="write a page with drawings here")
    add("--json", type=_cli.local_path, default="", help="write all of it here")
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    if bool(args.model) == bool(args.program):
        parser.error("give either --model or --program")
    if args.mesh and args.num_devices is not None:
        parser.error("--mesh says how many devices there are; leave out --num_devices")
    if args.program:
        for name in ("mesh", "num_devices", "model_params_override"):
            if getattr(args, name):
                parser.error(f"--{name} was fixed when the program was made; use it with --model")
    if args.html and args.json and os.path.realpath(args.html) == os.path.realpath(args.json):
        parser.error(f"--html and --json are both {args.html}; name two files")
    _cli.check_numbers(parser, args, num_devices=checks.Integer(2, MOST_DEVICES))
    return _cli.run_compiler("explain", run, args)


def run(args: Any) -> int:
    """As main, without turning errors into messages."""
    for flag in ("html", "json"):
        if getattr(args, flag):
            _cli.check_output_file(getattr(args, flag), f"--{flag}")
    with _cli.Progress() as progress:
        progress("loading TensorFlow and the compiler")
        explanation = progress.Watch(lambda: make(args, progress))
    from lingvo_moe.core import files

    found = {name: explanation.Sharding(name) for name in _cli.names(args.tensor)}
    if args.json:
        text = json.dumps(explanation.ToJson(), indent=1) + "\n"
        files.write_atomic(args.json, text.encode())
    if args.html:
        files.write_atomic(args.html, explanation.ToHtml().encode())
    if not found:
        print(explanation)
    for name, tensors in found.items():
        print(f"{name}:")
        for tensor in tensors:
            where = f"  {tensor.line}" if tensor.line else ""
            print(f"  {tensor}{where}{f' ({tensor.phase})' * (tensor.phase != 'forward')}")
    explanation.Check()
    return 0


def make(args: Any, say: Any) -> Any:
    """The explanation that the flags ask for; `say` is called with lines about the progress."""
    _cli.load_tensorflow()
    from lingvo_moe import explaining

    program = _load(args) if args.program else _lower(args, say)
    if not args.topology:
        _request_devices(program.mesh.size)
    say(f"compiling {program.name} for mesh {program.mesh}")
    return explaining.explain(program, topology=args.topology)


def _load(args: Any) -> Any:
    from lingvo_moe.core.engine.program import Program

    return Program.Load(args.program)


def _lower(args: Any, say: Any) -> Any:
    """The program of the experiment's training step."""
    from lingvo_moe.core import registry
    from lingvo_moe.core.engine.steps import train_step
    from lingvo_moe.trainer import make_mesh
    from lingvo_moe.trainer_checks import check_divisible, check_sizes

    params = registry.GetParams(args.model, args.model_params_override)
    mesh = make_mesh(params, args.mesh, 0 if args.mesh else args.num_devices or 8)
    task = params.task.Instantiate()
    check_divisible(params, task, mesh)
    check_sizes(params)
    _request_devices(mesh.size)
    say(f"lowering the train step of {args.model} for mesh {mesh}")
    return train_step(task, params.input.Instantiate()).Lower(mesh)


def _request_devices(count: int) -> None:
    from lingvo_moe.core.engine.base import EngineError
    from lingvo_moe.core.engine.devices import device_count, request_cpu_devices

    try:
        request_cpu_devices(count)
    except EngineError:  # This process has devices already, as in tests: enough will do.
        if device_count() < count:
            raise


if __name__ == "__main__":
    _cli.run(main)
