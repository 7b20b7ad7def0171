"""The variants that tools.compare_experts trains.

'experts' and 'routers' are variants of mt.M4Experts. A token's feed-forward layers cost 4 M H multiplications and
additions in each, H = 256 altogether: two experts of 128, one of 256, or sixteen of 16. 'recipes' are variants of
mt.M4Demo: each changes one thing of its recipe. 'balance' are variants of lm.MoEDemo in rows of half the length, on the
target sides of the pairs: 8 experts balanced by a loss, by a bias, or not at all, with three seeds each, for equal CPU
seconds.
"""

from dataclasses import dataclass

GROUPS = ("experts", "routers", "recipes", "balance")
STEPS = {"experts": 1000, "routers": 300, "recipes": 600, "balance": 10_000}
_BALANCE_SECONDS = 100  # of CPU, which end these runs long before their steps do


@dataclass(frozen=True)
class Variant:
    """One model of the comparison."""

    # 'experts' (more and more of them), 'routers' (at 16 experts), 'recipes' or 'balance', or several, space-separated.
    group: str
    experts: int  # E; 1 for the dense model
    says: str  # a short description
    override: str = ""  # as --model_params_override
    model: str = "mt.M4Experts"  # the experiment that it is a variant of

    @property
    def steps(self) -> int:
        """The training steps, by default; the most of its groups."""
        return max(STEPS[group] for group in self.group.split())


def _top2(experts: int, group: str = "experts") -> Variant:
    return Variant(group, experts, f"top-2 of {experts}, H = 128", f"task.num_experts={experts}")


def _router(name: str, says: str, *settings: str, hidden_dim: int = 128) -> Variant:
    parts = [f"task.moe.router={name}"]
    parts += [s if s.startswith("task.") else f"task.moe.router.{s}" for s in settings]
    if hidden_dim != 128:
        parts.append(f"task.expert_hidden_dim={hidden_dim}")
    return Variant("routers", 16, says, ";".join(parts))


_RATE = "task.optimizer.learning_rate"


def _recipe(says: str, *settings: str, experts: int = 8) -> Variant:
    """A variant of mt.M4Demo in 600 steps, at the end of which the rate has decayed where it decays to an end."""
    schedule = (
        ()
        if any(f"{_RATE}=" in s for s in settings)
        else (f"{_RATE}.total_steps={STEPS['recipes']}",)
    )
    override = ";".join((*settings, *schedule))
    return Variant("recipes", experts, says, override, model="mt.M4Demo")


def _schedule(name: str, **values: float) -> str:
    return ";".join([f"{_RATE}={name}", *(f"{_RATE}.{k}={v}" for k, v in values.items())])


def _balance(says: str, loss: float, bias: float, seed: int) -> Variant:
    """A variant of lm.MoEDemo: 0.01 times `loss` is the weight of its loss, `bias` its bias's step."""
    override = (
        f"task.moe.router.load_balance_weight={loss};task.moe.router.balance_bias={bias};"
        f"input.target_length=64;train.mesh=expert:1,model:1;task.seed={seed};input.seed={seed};"
        f"train.max_cpu_seconds={_BALANCE_SECONDS}"
    )
    return Variant("balance", 8, f"{says}, seed {seed}", override, "lm.MoEDemo")


_BALANCES = {
    "by_loss": ("a loss of weight 0.01", 1.0, 0.0),
    "by_bias": ("a bias, in steps of 0.01", 0.0, 0.01),
    "by_nothing": ("neither", 0.0, 0.0),
}

_WIDE = "task.expert_hidden_dim=256"  # two of them cost what the dense layer of H = 512 does

VARIANTS: dict[str, Variant] = {
    "dense": Variant("experts routers", 1, "dense, H = 256", "task.num_experts=0"),
    "top2_e4": _top2(4),
    "top2_e16": _top2(16, "experts routers"),
    "top2_e64": _top2(64),
    "switch": _router("top_k", "top-1 (Switch), H = 256", "k=1", hidden_dim=256),
    "top_2": _router("top_k", "top-k, k = 2"),
    "bias": _router(
        "top_k", "top-k, k = 2, balanced by bias", "load_balance_weight=0.0", "balance_bias=0.001"
    ),
    "noisy": _router("noisy_top_k", "noisy top-k, k = 2"),
    "task": _router("top_k", "top-k, k = 2, by language", "level=task", "num_tasks=97"),
    # A decoder cannot look at later tokens, as experts that choose do.
    "expert_choice": _router(
        "expert_choice", "experts choose; decoder top-2", "task.decoder_router=top2"
    ),
    "hash": _router("hash", "hash of the token, H = 256", hidden_dim=256),
    "lsh": _router("lsh", "locality-sensitive hash, H = 256", hidden_dim=256),
    "random": _router("random", "random, H = 256", hidden_dim=256),
    "soft": _router("soft", "all 16 experts, H = 16", hidden_dim=16),
    "default": _recipe("as it is: top-2 of 8, H = 512"),
    "constant_rate": _recipe(
        "no warm-up, constant rate 0.032", _schedule("gshard", constant_steps=1000)
    ),
    "inverse_sqrt": _recipe(
        "inverse square root instead of linear decay",
        _schedule("inverse_sqrt", value=0.06, warmup_steps=30, decay_start=60),
    ),
    "half_rate": _recipe("half the rate", f"{_RATE}.value=0.03"),
    "double_rate": _recipe("twice the rate", f"{_RATE}.value=0.12"),
    "adam": _recipe(
        "Adam, rate 0.006",
        "task.optimizer=adam",
        _schedule("linear", value=0.006, warmup_steps=30, total_steps=STEPS["recipes"]),
    ),
    "papers_balance": _recipe("a balance loss of 1/64", "task.moe.router.reading=paper"),
    "equal_cost": _recipe("top-2 of 8, H = 256", _WIDE),
    "equal_cost_e32": _recipe("top-2 of 32, H = 256", "task.num_experts=32", _WIDE, experts=32),
    "hash_e8": _recipe("hash of the token, 8 of H = 512", "task.moe.router=hash"),
    "hash_e32": _recipe(
        "hash of the token, 32 of H = 512",
        "task.moe.router=hash",
        "task.num_experts=32",
        experts=32,
    ),
    "dense_demo": _recipe("dense, H = 512", "task.num_experts=0", experts=1),
    **{
        f"{name}_seed{seed}": _balance(*settings, seed)
        for seed in (1, 2, 3)
        for name, settings in _BALANCES.items()
    },
}
