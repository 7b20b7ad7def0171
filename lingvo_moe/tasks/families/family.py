"""A family of published models: its config.json as parameters of a task, and the names of its weights.

Letters of layouts: m model, n heads, a heads of keys and values, k key, h hidden, e experts, f hidden of an expert,
s hidden of the shared experts, v vocabulary. `two` is a pair of numbers, `first` and `second` are of size one.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from lingvo_moe.core.config.hyperparams import Params
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.weights.mapping import WeightMapping, WeightRule
from lingvo_moe.core.weights.source import WeightsError, WeightSource, same_values
from lingvo_moe.tasks.text.vocabulary.language_codes import LanguageCodes
from lingvo_moe.tasks.text.vocabulary.tokenizer_json import JsonVocabulary
from lingvo_moe.tasks.transformer.stacks import TaskStack, layers_before, layers_of_block

# Keys of config.json that say nothing of what a model computes.
_SAYS_NOTHING = (
    "architectures model_type torch_dtype dtype transformers_version use_cache initializer_range _name_or_path "
    "bos_token_id eos_token_id pad_token_id unk_token_id max_position_embeddings pretraining_tp attention_dropout "
    "output_attentions output_hidden_states output_router_logits router_aux_loss_coef router_jitter_noise "
    "is_llama_config transformers.js_config _attn_implementation_autoset cache_implementation tokenizer_class "
    "unsloth_fixed unsloth_version"
)
_QUANTIZATION = "quantization_config"
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Default = bool | float | Callable[[Mapping[str, Any]], Any]
# By the `model_type` of config.json.
FAMILIES: dict[str, "Family"] = {}


class Family:
    """The rules of a family, which lie beside its experiments in params/.

    Attributes:
        TYPES: values of `model_type` in config.json; an export has the first.
        ARCHITECTURE: the class in `transformers`.
        EXPERIMENT: the experiment that has the family's parts; sizes come from config.json.
        KEYS: the keys of config.json that are a parameter each: parameter -> (key, its value where it is left out, or
            a function of the parameters before it).
        ALIASES: other names of keys, which some releases of the `transformers` library write -> those in KEYS.
        ALWAYS: further keys, with the value that the experiment's parts need, which is that of a missing key.
        OTHER_KEYS: the keys that Others reads and OtherKeys gives.
        RULES: see WeightMapping. Names have `{layer}`, or `{encoder}` and `{decoder}` in a model of two stacks.
        TABLE: the tensor of the embeddings, of which a tied head is a copy.
        VOCAB_SIZES: the parameters that are the vocabulary's number of ids.
        LEFT_OUT: regular expressions of the names of tensors that are no weights.
        FILES: the names of files that a run keeps, and an export gives back, as they are.
    """

    TYPES: ClassVar[tuple[str, ...]]
    ARCHITECTURE: ClassVar[str]
    EXPERIMENT: ClassVar[str]
    KEYS: ClassVar[Mapping[str, tuple[str, Default]]]
    ALIASES: ClassVar[Mapping[str, str]] = {}
    ALWAYS: ClassVar[Mapping[str, Any]] = {}
    OTHER_KEYS: ClassVar[Sequence[str]] = ()
    RULES: ClassVar[Sequence[WeightRule]]
    TABLE: ClassVar[str] = "model.embed_tokens.weight"
    VOCAB_SIZES: ClassVar[Sequence[str]] = ("input.target_vocab_size",)
    LEFT_OUT: ClassVar[Sequence[str]] = ()
    FILES: ClassVar[Sequence[str]] = ()

    def __init_subclass__(cls) -> None:
        """Adds the family to FAMILIES."""
        FAMILIES.update(dict.fromkeys(cls.TYPES, cls()))

    def Overrides(self, config: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The parameters, by path, that a config.json says. Raises WeightsError: what this model cannot represent."""
        config = {self.ALIASES.get(key, key): value for key, value in config.items()}
        values: dict[str, Any] = {}
        for parameter, (key, default) in self.KEYS.items():
            given = config
            if callable(default):  # then null is it, too
                default = default(values)
                given = {} if config.get(key) is None else config
            values[parameter] = number(given, key, default, where)
        for key, expected in self.ALWAYS.items():
            if (value := config.get(key, expected)) != expected and (value or expected):
                raise WeightsError(
                    f"{where}: {key}={value!r} cannot be represented; this family has {expected!r}"
                )
        if (kind := config.get(_QUANTIZATION)) is not None and not _is_read(kind):
            raise WeightsError(
                f"{where}: {_QUANTIZATION}={kind!r} cannot be read; expected quant_method fp8 in blocks of 128 x 128, "
                "or mxfp4"
            )
        keys = {_QUANTIZATION, *_SAYS_NOTHING.split(), *self.ALWAYS, *self.OTHER_KEYS}
        keys |= {key for key, _ in self.KEYS.values()}
        for key, value in config.items():
            if key not in keys and value not in (None, False):
                raise WeightsError(
                    f"{where}: {key}={value!r} is not known, so it might change results"
                )
        try:
            return {**values, **self.Others(config, where)}
        except (TypeError, LookupError, ZeroDivisionError) as e:
            raise WeightsError(f"{where}: a value is of another type than its key has: {e}") from e

    def Others(self, config: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The parameters that several keys say together."""
        return {}

    def Config(self, params: Params) -> dict[str, Any]:
        """A config.json of a model's parameters: those that it cannot say, Overrides does not give back."""
        config: dict[str, Any] = {"model_type": self.TYPES[0]}
        config |= {key: value for key, value in self.ALWAYS.items() if value is not None}
        values: dict[str, Any] = {}
        for parameter, (key, default) in self.KEYS.items():
            try:
                values[parameter] = params.Get(parameter)
            except AttributeError:  # of a part that this model has not
                continue
            if not values[parameter] and callable(default):  # 0: as others
                values[parameter] = default(values)
            config[key] = values[parameter]
        return config | self.OtherKeys(params.task)

    def OtherKeys(self, p: Params) -> dict[str, Any]:
        """The keys that say several parameters of a task together: the inverse of Others."""
        return {}

    def FromTensors(self, config: Mapping[str, Any], source: WeightSource) -> dict[str, Any]:
        """The parameters that config.json leaves to the tensors that are there."""
        return {}

    def Copies(self, p: Params) -> Mapping[str, str]:
        """The names of tensors that are copies of others, and the others' names; a source may lack them."""
        return {}

    def LeftOut(self, p: Params, source: WeightSource) -> list[str]:
        """Regular expressions of the names of tensors that are not for the model of parameters `p`.

        Raises WeightsError: one that must be a copy differs.
        """
        for name, other in self.Copies(p).items():
            if name in source.entries and not same_values(source, name, other):
                raise WeightsError(f"{source.where}: {name} must be a copy of {other}, and differs")
        return [*self.LEFT_OUT, *map(re.escape, self.Copies(p))]

    def Rules(self, p: Params) -> Sequence[WeightRule]:
        """The rules for the model of parameters `p`."""
        return self.RULES

    def Vocabulary(
        self, directory: Path, config: Mapping[str, Any]
    ) -> tuple[bytes, LanguageCodes | None]:
        """The vocabulary of a checkpoint, serialized; and its languages, if the model translates from any to any.

        Raises DataError: a file is missing or damaged.
        """
        return JsonVocabulary.Load(directory).model_bytes, None

    def Source(self, source: WeightSource) -> WeightSource:
        """The tensors by the names of RULES, where a file may have others. Raises WeightsError: copies differ."""
        return source

    def Sizes(self, p: Params) -> dict[str, int]:
        """The sizes of the axes of layouts."""
        return {
            "m": p.model_dim,
            "n": p.num_heads,
            "a": p.num_kv_heads or p.num_heads,
            "k": p.key_dim,
            "h": p.hidden_dim,
            "v": p.Get(p.cls.STACKS[-1].vocab_size),
            "e": p.num_experts,
            "f": p.expert_hidden_dim or 0,
            "s": (p.expert_hidden_dim or 0) * p.moe.num_shared_experts,
            "two": 2,
            "first": 1,
            "second": 1,
        }

    def Mapping(self, p: Params, specs: NestedMap) -> WeightMapping:
        """The pairs of a model of parameters `p` with these VariableSpecs. Raises WeightsError."""
        shapes = {path: tuple(spec.shape) for path, spec in specs.FlattenItems()}
        stacks = p.cls.STACKS
        places = {s.name if len(stacks) > 1 else "layer": _places(p, s) for s in stacks}
        return WeightMapping(self.Rules(p), shapes, places, self.Sizes(p))


def gates(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Whether the gates of a token's experts sum to one: norm_topk_prob. Raises WeightsError: of a single expert."""
    normalized = bool(config.get("norm_topk_prob"))
    if normalized and config.get("num_experts_per_tok") == 1:
        raise WeightsError(
            f"{where}: norm_topk_prob=True with num_experts_per_tok=1 cannot be represented; expected false"
        )
    return {"task.moe.router.normalize_gates": "before_drops" if normalized else "never"}


def gate_keys(p: Params) -> dict[str, Any]:
    """The key that says whether gates sum to one, of a task: the inverse of gates."""
    router = p.moe.router
    if not p.num_experts or "normalize_gates" not in router:
        return {}
    usual = "never" if router.k == 1 else "before_drops"
    return {"norm_topk_prob": (router.normalize_gates or usual) != "never"}


def number(config: Mapping[str, Any], key: str, default: Any, where: str) -> Any:
    """The value of a key, or the default where it is left out. Raises WeightsError: it is no number.

    Null is no default: it means "none". So it is one where the default is false or 0.
    """
    value = default if (value := config.get(key, default)) is None and not default else value
    if not isinstance(value, (bool, int, float)):
        raise WeightsError(f"{where}: {key}={value!r}; expected a number, true or false")
    return value


def _is_read(quantization: Any) -> bool:
    """Whether it is what core/weights/quantized.py reads: float8 with a scale for each block, or MXFP4."""
    if not isinstance(quantization, dict):
        return False
    method, block = (quantization.get(key) for key in ("quant_method", "weight_block_size"))
    return method == "mxfp4" or (method == "fp8" and block == [128, 128])


def _places(p: Params, stack: TaskStack) -> list[tuple[str, int | None]]:
    """The path of what has each layer of a stack, and its index there; last the head for the token after the next."""
    before, size, name = layers_before(p), layers_of_block(p), stack.name
    first = [(f"{name}.first.body.layers[0]", layer) for layer in range(before)]
    rest = range(p.Get(stack.num_layers) - before)
    blocks = [(f"{name}.blocks.body.layers[{i % size}]", i // size) for i in rest]
    return [
        *first,
        *blocks,
        *([("multi_token", None)] if stack.causal and p.multi_token_weight else []),
    ]
