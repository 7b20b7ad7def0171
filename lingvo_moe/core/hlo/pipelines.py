"""Finds the loops of pipelines in a compiled program.

A pipeline runs its stages in lockstep: one iteration of a loop is a tick, in which every stage does its work once, and
then passes the result on. The name scope of each loop ends in `pipeline.PHASE`, e.g. m4/encoder/pipeline.forward.
"""

import re
from typing import NamedTuple

from lingvo_moe.core.hlo import parts

FORWARD, BACKWARD, WEIGHT_GRADIENTS = "forward", "backward", "weight_gradients"
FORWARD_BACKWARD = "forward_backward"
# In the order of a step.
PHASES = (FORWARD, FORWARD_BACKWARD, BACKWARD, WEIGHT_GRADIENTS)
_LOOP = re.compile(rf"^((?:.*/)?pipeline\.)({'|'.join(PHASES)})/while(?:_\d+)?(/.*)?$")
# What may precede the pipeline's own scope: enclosing loops, and the scopes of gradients.
_AROUND = re.compile(r"^(?:.*/body/)?(?:(?:closed_call|gradient_tape|optimizer)/)*")


class PipelineLoop(NamedTuple):
    """The name of a pipeline's loop.

    Attributes:
        pipeline: the scope of the pipeline, e.g. 'm4/encoder'; '' without one.
        phase: one of PHASES.
    """

    pipeline: str
    phase: str


def pipeline_loop(op_name: str) -> PipelineLoop | None:
    """Reads the name of a `while` instruction; None if it is not the loop over a pipeline's ticks.

    Loops inside a tick, e.g. over the layers of a stage, are none.
    """
    return _match(op_name, inside=False)


def loop_of_operation(op_name: str) -> PipelineLoop | None:
    """The loop in whose ticks an operation was traced, as its name tells; None for other operations.

    The compiler removes a loop of a single tick, so that its operations run outside of any loop.
    """
    return _match(op_name, inside=True)


def _match(op_name: str, inside: bool) -> PipelineLoop | None:
    for joined in op_name.split(";"):
        found = _LOOP.match(joined)
        if found is None or bool(found[3]) != inside:
            continue
        for scope in parts.operations(found[1] + found[2]):
            return PipelineLoop(
                _AROUND.sub("", scope).removesuffix(f"pipeline.{found[2]}").strip("/"), found[2]
            )
    return None
