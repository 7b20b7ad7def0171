"""The layers of mt.M4Tiny as they declare their parts, for tests of compiled text: a dense and an MoE layer a block."""

from lingvo_moe.analysis.programs.hlo.parts import Layers
from lingvo_moe.core.config import registry


def tiny_layers(name: str) -> Layers:
    """The layers of mt.M4Tiny under another name."""
    task = registry.GetParams("mt.M4Tiny").task.Copy().Set(name=name)
    return Layers(task.Instantiate().DeclaredParts())
