"""Finds the loops of pipelines in a compiled program.

A pipeline runs its stages in lockstep: one iteration of a loop is a tick, in which every stage does its work once, and
then passes the result on. The name scope of each loop says what its ticks do, in one of two forms:

* `m4/pipeline/encoder_forward__decoder_backward`: the pipeline is m4; a tick does the forward pass of its stack
  `encoder` and the backward pass of its stack `decoder`;
* `m4/encoder/pipeline.forward_backward`: the pipeline is m4/encoder, of one stack without a name.
"""

import re
from typing import NamedTuple

from lingvo_moe.analysis.programs.hlo import parts

FORWARD, BACKWARD, WEIGHT_GRADIENTS, LOSS = "forward", "backward", "weight_gradients", "loss"
KINDS = (FORWARD, BACKWARD, WEIGHT_GRADIENTS, LOSS)
_PHASES = {
    "forward": (FORWARD,),
    "forward_backward": (FORWARD, BACKWARD),
    "backward": (BACKWARD,),
    "weight_gradients": (WEIGHT_GRADIENTS,),
}
_WORK = rf"\w+?_(?:{'|'.join(KINDS)})"
_LOOP = re.compile(
    rf"^((?:.*/)?)(pipeline\.(?:{'|'.join(_PHASES)})|pipeline/{_WORK}(?:__{_WORK})*)/while(?:_\d+)?(/.*)?$"
)
# What may precede the pipeline's own scope: enclosing loops, and the scopes of gradients.
_AROUND = re.compile(r"^(?:.*/body/)?(?:(?:closed_call|gradient_tape|optimizer)/)*")


class TickWork(NamedTuple):
    """The work of a tick for one stack of layers: one of KINDS. The stack may have no name."""

    stack: str
    kind: str


class PipelineLoop(NamedTuple):
    """The name of a pipeline's loop."""

    pipeline: str  # the scope of the pipeline, e.g. 'm4/encoder'; '' without one
    phase: str  # what its scope says of its ticks, e.g. 'forward_backward'

    @property
    def works(self) -> tuple[TickWork, ...]:
        """The work of a tick, one for each stack of layers and kind."""
        if self.phase in _PHASES:
            return tuple(TickWork("", kind) for kind in _PHASES[self.phase])
        return tuple(map(_work, self.phase.split("__")))


def _work(text: str) -> TickWork:
    kind = next(kind for kind in KINDS if text.endswith(f"_{kind}"))
    return TickWork(text.removesuffix(f"_{kind}"), kind)


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
        match = _LOOP.match(joined)
        if match is None or bool(match[3]) != inside:
            continue
        phase = match[2].removeprefix("pipeline")[1:]
        for scope in parts.operations(f"{match[1]}pipeline"):
            return PipelineLoop(_AROUND.sub("", scope).removesuffix("pipeline").strip("/"), phase)
    return None
