"""The answers to the questions of engines, as core/engine/program_analysis.py has them."""

from lingvo_moe.analysis.programs.checking import compile_checked
from lingvo_moe.analysis.programs.hlo.collective_list import parse_collectives

__all__ = ["compile_checked", "parse_collectives"]
