"""Plans of the published language models, each on a slice of TPUs that holds its training, and the page with them.

Nothing of this was searched for or tuned: a layout of the same kind for all.
"""

from pathlib import Path

from lingvo_moe.core.console import units
from lingvo_moe.core.pages import rendering

from . import goldens, measures, text
from .requests import Wanted

PREFIX = "open-"
LENGTH = 4096  # tokens of a row
_ALL = f"task.repeat=True;task.remat=full;train.shard_state=none;input.target_length={LENGTH}"
# Loads are planned as equal: devices send each other equally many rows.
_EXPERTS = (
    "task.moe.dispatcher.cls=type/lingvo_moe.core.moe.dispatch_dropless/DroplessDispatcher;"
    'task.moe.dispatcher.device_capacity_factor=1;task.weight_split={"E":"expert","M":"fsdp"};'
    'task.activation_split={"B":["fsdp","expert"],"G":["fsdp","expert"],"E":"expert"}'
)
_DENSE = 'task.weight_split={"M":"fsdp"};task.activation_split={"B":"fsdp"}'


def _wanted(layout: tuple[str, str, int, int, int]) -> Wanted:
    """A training step in one of _LAYOUTS."""
    model, topology, fsdp, expert, rows = layout
    mesh = f"fsdp:{fsdp}" + f",expert:{expert}" * (expert > 1)
    batch = f"input.batch_size={rows * fsdp * expert}"
    split = _EXPERTS if expert > 1 else _DENSE
    return Wanted(f"lm.{model}", topology, f"{_ALL};{split};{batch}", mesh=mesh)


# Model, slice, sizes of both axes, rows a chip.
_LAYOUTS: tuple[tuple[str, str, int, int, int], ...] = (
    ("OLMoE1B7B", "v5p:4x4x4", 8, 8, 4),
    ("DeepSeekV2Lite", "v5p:4x4x4", 8, 8, 4),
    ("GptOss20B", "v5p:4x4x4", 8, 8, 4),
    ("Qwen3_30B_A3B", "v5p:4x4x4", 8, 8, 4),
    ("Mixtral8x7B", "v5p:4x4x4", 8, 8, 4),
    ("Llama4Scout", "v5p:4x4x8", 8, 16, 4),
    ("GptOss120B", "v5p:4x4x8", 8, 16, 4),
    ("Mixtral8x22B", "v5p:4x4x8", 16, 8, 4),
    ("Qwen3_235B_A22B", "v5p:8x8x8", 16, 32, 4),
    ("Llama4Maverick", "v5p:8x8x16", 16, 64, 2),
    ("DeepSeekV3", "v5p:8x16x16", 32, 64, 2),
    ("KimiK2", "v5p:8x16x16", 32, 64, 2),
    ("Llama31_8B", "v5p:4x4x4", 64, 1, 4),
    ("Llama31_70B", "v5p:4x4x8", 128, 1, 4),
    ("Llama31_405B", "v5p:8x16x16", 2048, 1, 2),
)
REQUESTS = {PREFIX + layout[0]: _wanted(layout) for layout in _LAYOUTS}


def page(plans: Path) -> str:
    """docs/open_models.md."""
    return text.fill(
        rendering.markdown(
            __package__,
            "open_models.md",
            plans=goldens.read_all(plans, REQUESTS),
            requests=REQUESTS,
            length=LENGTH,
            measures=measures,
            units=units,
        )
    )
