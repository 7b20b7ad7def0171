"""Overrides of experiments that are refused, in one table: the experiment, what is set, and a part of the message."""

from refusals import refuses

from lingvo_moe.core.config.registry import GetParams, RegistryError

_NAMES = "the model's names are query, key, value, attention, hidden, feed_forward"
_RATE = "task.optimizer.learning_rate"


@refuses(RegistryError,
    # Names, and forms of values.
    ("mt.M4MoE2048E36", "", "did you mean.*mt.M4MoE2048E36L"),
    ("asr.Any", "", "no task 'asr'.*mt"),
    ("M4Tiny", "", "expected task.Experiment"),
    ("mt.M4Tiny", "task.num_expert=4", "did you mean 'num_experts'"),
    ("mt.M4Tiny", "task.num_experts=four", "does not read as int"),
    ("mt.M4Tiny", "input.languages=de, sw", r"read as list; did you mean \['de','sw'\]"),
    ("mt.M4Tiny", "task.num_experts", "not of the form path=value"),
    # Optimizers and schedules.
    ("mt.M4Tiny", "task.optimizer=adan",
     r"'adan' \(did you mean 'adam' or 'adamw'\?\); known: adafactor, adam, adamw, gshard, sgd;"),
    ("mt.M4Tiny", "task.optimizer=Lion", r"'Lion' \(known: adafactor, adam, adamw, gshard, sgd\)"),
    ("mt.M4Tiny", f"{_RATE}=cosin",
     r"'cosin' \(did you mean 'cosine'\?\); known: constant, cosine, gshard, inverse_sqrt, linear, transf"),
    ("mt.M4Tiny", "task.optimizer.momentum=0.9",
     r"no parameter 'task\.optimizer\.momentum'; it needs task\.optimizer=sgd before it"),
    ("mt.M4Tiny", "task.optimizer=None", "must be one of adafactor, adam, adamw, gshard, sgd"),
    ("mt.M4Tiny", "task.ema_decay=1", r"task\.ema_decay=1: must be a number in \[0, 1\)"),
    ("mt.M4Tiny", f"task.optimizer=adam;{_RATE}=transformer;task.model_dim=64;{_RATE}.model_dim=3",
     r"the model sets it from task\.model_dim"),
    ("mt.M4Tiny", f"{_RATE}=linear;{_RATE}.total_steps=9;{_RATE}.warmup_steps=9", ValueError,
     r"^task\.optimizer\.learning_rate\.total_steps=9: must be"),
    # Routers.
    ("mt.M4Tiny", "task.moe.router=top_2", r"no such choice: 'top_2' \(did you mean 'top2'"),
    ("mt.M4Tiny", "task.moe.router=Switch", r"known: expert_choice, hash, lsh"),
    ("mt.M4Tiny", "task.moe.router=hash;task.moe.router.kk=1", r"no parameter .*did you mean 'k'"),
    ("mt.M4Tiny", "task.moe.router.cls=type/lingvo_moe.core.files.files/only_one", "is no class"),
    ("mt.M4Tiny", "task.moe.router=expert_choice", ValueError,
     r"moe\.router=ExpertChoiceRouter: looks at later tokens"),
    ("mt.M4Tiny", "task.decoder_router=top2;task.decoder_router.level=sentence", ValueError,
     r"decoder_router=Top2Router: looks at later tokens"),
    # Recomputation.
    ("mt.M4Tiny", "task.remat=dost", ValueError,
     r"task\.remat=dost: must be full, dots or a list of names \(did you mean 'dots'\?\)"),
    ("mt.M4Tiny", "task.remat=['query', 'hiden']", ValueError,
     r"task\.remat=\['query', 'hiden'\]: no layer of this model has 'hiden' \(did you mean 'hidden'\?\); "
     f"{_NAMES}, router, dispatched, returned, experts_hidden, combined"),
    ("mt.M4Tiny", "task.num_experts=0;task.remat=['hidden', 'returned']", ValueError,
     r"^task\.remat=\['hidden', 'returned'\]: no layer of this model has 'returned'; " + f"{_NAMES}$"),
    ("mt.M4Tiny", "task.remat=none", ValueError, "task.repeat=False keeps every activation"),
    ("mt.M4Tiny", "task.remat=dots;task.repeat=False", ValueError, "; set task.repeat=True, or task.remat=full"),
)  # fmt: skip
def test_an_override_is_refused(experiment, override):
    GetParams(experiment, override).task.Instantiate()
