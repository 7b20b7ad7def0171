"""Optimizers and schedules by the names that parameters may have; a class is imported when it is asked for."""

from lingvo_moe.core.config.checks import either
from lingvo_moe.core.config.class_names import ClassesByName

_HERE = "lingvo_moe.core.optimizers"

OPTIMIZERS = ClassesByName(
    {
        "adafactor": f"{_HERE}.adafactor.Adafactor",
        "adam": f"{_HERE}.adam.Adam",
        "adamw": f"{_HERE}.adam.AdamW",
        "gshard": f"{_HERE}.adafactor.GShardAdafactor",
        "sgd": f"{_HERE}.sgd.Sgd",
    }
)

SCHEDULES = ClassesByName(
    {
        "constant": f"{_HERE}.schedules.Constant",
        "cosine": f"{_HERE}.schedules.Cosine",
        "gshard": f"{_HERE}.schedules.SqrtDecay",
        "inverse_sqrt": f"{_HERE}.schedules.InverseSqrt",
        "linear": f"{_HERE}.schedules.Linear",
        "transformer": f"{_HERE}.schedules.Transformer",
        "wsd": f"{_HERE}.schedules.WarmupStableDecay",
    }
)


def elementwise_optimizers() -> str:
    """The names of the optimizers whose update of an element depends on no other, for errors: 'adam, adamw or sgd'."""
    classes = OPTIMIZERS.items()
    return either(name for name, cls in classes if cls.ELEMENTWISE)  # type: ignore[attr-defined]
