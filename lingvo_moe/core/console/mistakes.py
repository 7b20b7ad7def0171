"""Reports an error to the user of a command: what this package refuses in one line, anything else with its places.

A refusal is an error of one of this package's classes, or a ValueError that a `raise` in one of its files made. An
OSError is reported in one line too, unless the user's own code met it. For any other error, the report shows the user's
line and the layer that was being traced or made, as for a shape that does not fit in an FProp:

    error: ValueError: Dimensions must be equal, but are 16 and 8 for '{{node line/add}} = AddV2...
      mine.py:22 in FProp of layer line.head: return y + x
      --traceback shows the whole traceback
"""

import contextlib
import dis
import re
import sys
import traceback
from collections.abc import Iterator
from types import TracebackType

from lingvo_moe.core.console.command import say
from lingvo_moe.core.console.source_lines import SourceLine, is_model_code, is_ours

_HINTS = {
    r"symbolic `tf.Tensor` as a Python `bool`|Iterating over a symbolic": "a tensor has no value while it is traced: "
    "use tf.where or tf.cond instead of `if`, and tf.unstack or tf.map_fn instead of a loop",
    r"symbolic tf.Tensor .* to a numpy array": "a tensor has no value while it is traced: use TensorFlow's functions",
    r"\bXlaSharding": "XlaSharding is a tensor that Shard, mesh_split or a sharding of an argument has annotated",
}
_whole: list[bool] = []  # whether tracebacks are shown


def show_tracebacks(show: bool) -> None:
    """Makes `report` show whole tracebacks, or not, as --traceback says."""
    _whole[:] = [show]


def report(command: str, error: Exception) -> bool:
    """Prints an error to standard error, after the name of the command.

    Returns False, with nothing printed, for an error that only a traceback explains: one of this package's code, and
    neither a refusal nor a ValueError.
    """
    refused = is_refusal(error)
    shown = [] if refused else places(error)
    if not refused and not shown:
        if not isinstance(error, ValueError):
            return False
        shown = [str(line) for line, _ in _frames(error) if is_ours(line.file)][-1:]
    if whole := any(_whole):
        traceback.print_exception(error)
    if refused:
        say(f"{command}: {one_line(error)}")
        return True
    say(f"{command}: {_why(error)}")
    for line in [*shown, *([] if whole else ["--traceback shows the whole traceback"])]:
        say(f"  {line}")
    return True


def one_line(error: Exception) -> str:
    """An error with the user's line that met it, if there is one, for where there is room for one line."""
    said = str(error) if is_refusal(error) else _why(error)
    return f"{said} ({at[0]})" if (at := places(error)) else said


def is_refusal(error: Exception) -> bool:
    """Whether this package raised an error on purpose, or the system did where none of the user's code was run."""
    if not isinstance(error, (ValueError, OSError)):
        return False
    module = sys.modules.get(type(error).__module__)
    if is_ours(getattr(module, "__file__", None) or "/"):
        return True
    for tb in [*_tracebacks(error)][-1:]:
        code = tb.tb_frame.f_code
        if is_ours(code.co_filename) and dis.opname[code.co_code[tb.tb_lasti]] == "RAISE_VARARGS":
            return True
    return isinstance(error, OSError) and not places(error)


def places(error: Exception) -> list[str]:
    """The user's line that met an error and the layer's below it, if there is one, and a hint; [] without a user's."""
    frames = _frames(error)
    users = [i for i, (line, _) in enumerate(frames) if _is_users(line.file)]
    if not users:
        return []
    below = range(users[-1] + 1, len(frames))
    shown = users[-1:] + [i for i in below if is_model_code(frames[i][0].file)][-1:]
    lines = [
        f"{line} in {line.function}{layer and f' of layer {layer}'}: {line.text}"
        for line, layer in (frames[i] for i in shown)
    ]
    return lines + [hint for pattern, hint in _HINTS.items() if re.search(pattern, str(error))]


@contextlib.contextmanager
def noting_places() -> Iterator[None]:
    """Adds the `places` of an error inside the block to it, as notes, which end its traceback; refusals stay."""
    try:
        yield
    except Exception as e:
        if not is_refusal(e) and not hasattr(e, "__notes__"):
            for line in places(e):
                e.add_note(line)
        raise


def _why(error: Exception) -> str:
    said = str(error).partition(" You can attempt the following resolutions")[0]
    return f"{type(error).__name__}: {said}"


def _is_users(file: str) -> bool:
    # Not that of no file, "<string>", which generated methods of dataclasses have too.
    return is_model_code(file) and not is_ours(file) and not file.startswith("<")


def _tracebacks(error: BaseException) -> Iterator[TracebackType]:
    tb = error.__traceback__
    while tb is not None:
        yield tb
        tb = tb.tb_next


def _frames(error: BaseException) -> list[tuple[SourceLine, str]]:
    """The lines that led to an error, outermost first, each with the path of the innermost layer whose method ran."""
    frames, layer = [], ""
    for tb in _tracebacks(error):
        code = tb.tb_frame.f_code
        attributes = getattr(tb.tb_frame.f_locals.get("self"), "__dict__", {})
        if "children" in attributes and isinstance(attributes.get("path"), str):  # a BaseLayer's
            layer = attributes["path"]
        frames.append((SourceLine(code.co_filename, tb.tb_lineno, code.co_name), layer))
    if isinstance(error, SyntaxError) and error.filename:
        frames.append((SourceLine(error.filename, error.lineno or 0, "its syntax"), ""))
    return frames
