"""Variables that learn more slowly than the others, such as the gating networks of routers."""

from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.optimizers.variable_patterns import matched, wholly


def define_slow_variables(p: InstantiableParams) -> None:
    """Defines `slow`, the patterns of these variables, and `slow_share`."""
    p.Define(
        "slow",
        [],
        "Variables with a lower learning rate, e.g. ['*.router.*']: patterns of their names.",
        checks.ListOf(checks.TEXT, "a list of patterns"),
    )
    share = checks.Number(0, 1, open_low=True)
    p.Define("slow_share", 0.1, "Their learning rate, over that of the others.", share)
    p.OnlyWith("slow_share", lambda p: "" if p.slow else "slow=[]")


def slow_variables(specs: NestedMap, p: InstantiableParams) -> frozenset[str]:
    """The paths of the variables that a pattern of `slow` matches.

    Raises ParamError: a pattern that matches no trainable variable, or only some of the variables that another packs.
    """
    trained = [spec for spec in specs.Flatten() if spec.trainable]
    return wholly(trained, matched("slow", p.slow, trained), "learns slowly", ("slow", p.slow))
