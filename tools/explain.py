"""Prints how a program's tensors are sharded, the communication that this causes, and the line of code behind each.

    python -m tools.explain --model=mt.M4Tiny
    python -m tools.explain --model=mt.M4Demo --mesh=expert:4 --html=explain.html --json=explain.json
    python -m tools.explain --program=train_step.program
    python -m tools.explain --model=mt.M4Tiny --tensor=m4.encoder.blocks.body.layers_1.ffn.dispatcher

The step is the trainer's own, compiled for virtual CPU devices by XLA, whose sharding propagation and
SPMD partitioner decide all of it; nothing is run. A program file, as `Program.Save` writes it, has no
line numbers. The exit status is 0, 1 or (in flags) 2 for a mistake, 130 after Ctrl-C.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lingvo_moe.core.console.flags import Flags, same_place
from lingvo_moe.core.job.job_flags import MOST_DEVICES
from lingvo_moe.training.flags import define_experiment_flag

from . import _cli

if TYPE_CHECKING:  # they import NumPy
    from lingvo_moe.analysis.programs.partitioner.explanation import Explanation
    from lingvo_moe.core.engine.lowering.program import Program


def define_flags() -> Flags:
    flags = Flags("python -m tools.explain", __doc__)
    define_experiment_flag(
        flags, "experiment whose training step to explain, e.g. mt.M4Tiny", required=False
    )
    flags.DEFINE_path("program", "", "a program file to explain instead")
    _cli.define_mesh_flags(flags, MOST_DEVICES)
    flags.DEFINE_string(
        "topology",
        "",
        "compile for a TPU slice or a GPU cluster that need not be there, e.g. v3:2x2 or h100:1x8",
    )
    flags.DEFINE_override()
    flags.DEFINE_list("tensor", (), "show only these tensors, layers or scopes")
    flags.DEFINE_path("html", "", "write a page with drawings to this file")
    flags.DEFINE_path("json", "", "write the whole explanation to this file")
    flags.Refuse(["html", "json"], same_place)
    fixed = "it was fixed when the program was made"
    flags.OnlyWith("mesh num_devices model_params_override", fixed, model=True)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    if bool(args.model) == bool(args.program):
        args.Fail("give either --model or --program")
    return _cli.attempt_compiling("explain", lambda: run(args))


def run(args: Flags) -> int:
    """Explains, prints and writes what the flags ask for; returns the exit status."""
    _cli.check_output_files(args, "html", "json")
    with _cli.CompilerProgress() as progress:
        explanation = progress.Watch(lambda: make(args, progress))
    from lingvo_moe.core.files import files

    shardings = {name: explanation.Sharding(name) for name in args.tensor}
    if args.json:
        files.write_json(args.json, explanation.ToJson())
    if args.html:
        files.write_atomic(args.html, explanation.ToHtml().encode())
    if not shardings:
        print(explanation)
    for name, tensors in shardings.items():
        print(f"{name}:")
        for tensor in tensors:
            where = f"  {tensor.line}" if tensor.line else ""
            print(f"  {tensor}{where}{f' ({tensor.phase})' * (tensor.phase != 'forward')}")
    if args.html or args.json:
        _cli.made(*filter(None, (args.html, args.json)))
    explanation.Check()
    return 0


def make(args: Flags, say: Callable[[str], None]) -> "Explanation":
    """The explanation that the flags ask for; `say` receives progress."""
    _cli.load_tensorflow()
    from lingvo_moe.analysis.explain import explaining
    from lingvo_moe.core.engine.lowering.program import Program

    program = Program.Load(args.program) if args.program else _lower(args, say)
    if not args.topology:
        _cli.request_devices(program.mesh.size)
    say(f"compiling {program.name} for mesh {program.mesh}")
    return explaining.explain(program, topology=args.topology)


def _lower(args: Flags, say: Callable[[str], None]) -> "Program":
    """The program of the experiment's training step."""
    from lingvo_moe.analysis.plans.machines.machine import parse_machine
    from lingvo_moe.analysis.plans.recomputing import chosen_form
    from lingvo_moe.analysis.plans.step_plan import topology_memory
    from lingvo_moe.core.config import registry
    from lingvo_moe.core.engine.device_memory import memory_of
    from lingvo_moe.core.engine.loop.steps import train_step
    from lingvo_moe.core.engine.lowering.lowering import lower_step
    from lingvo_moe.core.task.meshes import check_divisible
    from lingvo_moe.training.checks import strategy_override

    defined = registry.AsDefined(args.model)
    params = registry.WithOverrides(defined, strategy_override(args, defined))
    mesh = _cli.mesh_of(args, params)
    task = params.task.Instantiate()
    check_divisible(params, task, mesh)
    task.CheckInput(params.task, params.input)
    _cli.request_devices(mesh.size)
    memory = (
        topology_memory(parse_machine(args.topology)) if args.topology else memory_of("pjrt", mesh)
    )
    form, line = chosen_form(params, mesh, memory)
    if line:
        say(line)
    say(f"lowering the train step of {args.model} for mesh {mesh}")
    step = train_step(
        form.Instantiate(), params.input.Instantiate(), params.train.num_micro_batches
    )
    return lower_step(step, mesh)


if __name__ == "__main__":
    _cli.run(main)
