"""BaseLayer: a pure function of (theta, inputs) with children, and variables that are specs before they are tensors."""

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import tensorflow as tf

from lingvo_moe.core import randomness
from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams, ParamError, Params as HyperParams
from lingvo_moe.core.initializers import InitOfVariable, WeightInit
from lingvo_moe.core.kernels.weights import Packed, Packing, Weight
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.sharding import Axis, DimsMapping, Mesh, dims_mapping
from lingvo_moe.core.sharding.annotate import shard_letters
from lingvo_moe.core.sharding.letters import (
    ACTIVATION_LETTERS,
    DEVICE,
    NONE,
    WEIGHT_LETTERS,
    WEIGHTS,
    shards,
    split_over_copies,
)
from lingvo_moe.core.tensors import Kept, keep

_DTYPES = ("float32", "bfloat16", "float16", "float64")
_LATER = {"auto": "the trainer alone takes auto, and for task.fprop_dtype"}

# Parameters that a child takes from its parent where its own Params leave them open.
_INHERITED = ("dtype", "fprop_dtype", "activation_split", "weight_split", "shard_state", "offload")


def scoped(method: Callable[..., Any], scope: str = "") -> Callable[..., Any]:
    """A layer's method whose operations carry the layer's path in their names, in whichever scope it is called.

    For methods that compute with `theta` or a routing. A method that overrides a scoped one, as every FProp does, is
    scoped without the decorator.
    """

    @functools.wraps(method)
    def run(self: "BaseLayer", *args: Any, **kwargs: Any) -> Any:
        with name_scope(f"{self.path}.{scope}" if scope else self.path):
            return method(self, *args, **kwargs)

    run.scoped_in = scope  # type: ignore[attr-defined]
    return run


def within(scope: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a method `scoped` in one of the layer's SCOPES."""
    return functools.partial(scoped, scope=scope)


def name_scope(path: str) -> Any:
    """The name scope of a dotted path, from the root whatever scope is open."""
    return tf.name_scope(path.replace(".", "/") + "/")


@dataclass(frozen=True)
class WeightParams:
    """A variable as a layer declares it with CreateVariable."""

    shape: tuple[int, ...]  # static
    letters: str  # one einsum letter per dimension, e.g. 'EMH'; the sharding follows from them
    init: WeightInit
    dtype: str | None = None  # None takes the layer's
    # False for state that no gradient changes. Unchanged unless a layer returns a new value in `updates`: see
    # BaseTask.FProp.
    trainable: bool = True
    # True for a bias or a scale, which optimizers treat as a vector, however many dimensions it has.
    is_vector: bool = False

    @classmethod
    def Vector(cls, shape: Sequence[int], letters: str, value: float) -> "WeightParams":
        """A bias or a scale that is `value` everywhere at first."""
        return cls(tuple(shape), letters, WeightInit.Constant(value), is_vector=True)


@dataclass(frozen=True)
class VariableSpec:
    """A variable that has not been allocated."""

    path: str  # dotted, unique in the model; the initial value is keyed by it
    shape: tuple[int, ...]
    dtype: str
    letters: str  # one einsum letter per dimension, 'L' for those of stacked layers
    init: WeightInit  # for one layer of a stack
    split: DimsMapping  # the mesh axis, axes or None of each dimension
    stack_dims: int = 0  # how many leading dimensions count layers (`repeat`)
    trainable: bool = True  # whether gradients change it
    # The dimensions that are also sharded along mesh axes which `split` leaves out, where these divide them: see
    # split_over_copies in sharding/letters.py.
    free_dims: tuple[int, ...] = ()
    memory: str = DEVICE  # DEVICE or HOST, where it is between two steps
    # The specs of the variables that this one packs; () for other variables. Row k of such a variable, whose shape is
    # [K, P], holds the elements of those of packs[k] one after another, then zeros.
    packs: "tuple[tuple[VariableSpec, ...], ...]" = ()
    is_vector: bool = False  # whether it is a bias or a scale; see WeightParams

    @property
    def parts(self) -> "list[VariableSpec]":
        """The variables that this one packs; itself if it packs none."""
        return [part for row in self.packs for part in row] or [self]

    def Stacked(self, num: int, axis: Axis = None, parts: int = 1) -> "VariableSpec":
        """The spec of `num` such variables in one, along a new leading dimension L, which a mesh axis may shard.

        Args:
            num: L.
            axis: that shards L.
            parts: how many parts L is divided into, a multiple of the devices along the axis. Where they cannot be
                equal, the axis shards the first dimension that no other axis shards and that has equal parts; if there
                is none, the variable is replicated along the axis.
        """
        split = [axis, *self.split]
        if axis is not None and num % parts:
            split[0] = None
            free = [i for i, n in enumerate(self.shape) if split[i + 1] is None and n % parts == 0]
            if free:
                split[free[0] + 1] = axis
        return replace(
            self,
            shape=(num, *self.shape),
            letters="L" + self.letters,
            split=tuple(split),
            stack_dims=self.stack_dims + 1,
            free_dims=tuple(dim + 1 for dim in self.free_dims),
        )

    def OverCopies(self) -> "VariableSpec":
        """The spec of such a variable of which no mesh axis holds copies, if it divides a dimension of a layer."""
        return replace(self, free_dims=tuple(range(self.stack_dims, len(self.shape))))

    def StoredSplit(self, mesh: Mesh) -> DimsMapping:
        """The mesh axis, axes or None of each dimension between two steps: `split`, and axes for `free_dims`."""
        return split_over_copies(self.shape, self.split, self.free_dims, mesh)

    def Init(self, seed: tf.Tensor, draws: "_Draws | None" = None) -> tf.Tensor:
        """The initial value, keyed by the seed (int32 [2]) and the path; layer i of a stack folds
        in i. The parts of a packed variable start as they would on their own.

        `draws`: what has been traced for other variables, by kind; see initial_values.
        """
        if isinstance(self.init, InitOfVariable):
            return self.init.OfVariable(self, seed)
        if self.stack_dims > 1:
            raise ValueError(f"{self.path}: layers are stacked once, not {self.stack_dims} times")
        if not self.init.is_random:  # most values of a state
            return self._Draw(seed)
        seed = randomness.fold_in(seed, self.path)
        if draws is None or type(self.init) is not WeightInit:  # another may depend on more
            return self._Draw(seed)
        kind = self.init, self.shape, self.dtype, self.stack_dims
        if kind not in draws:
            traced = tf.function(self._Draw, autograph=False)
            draws[kind] = traced.get_concrete_function(tf.TensorSpec(seed.shape, seed.dtype))
        return draws[kind](seed)

    def _Draw(self, seed: tf.Tensor) -> tf.Tensor:
        """The initial value; `seed` is folded with the path."""
        if self.init.is_random and self.stack_dims:
            seed = randomness.fold_in(seed, tf.range(self.shape[0]))
        return self.init(seed, self.shape, tf.as_dtype(self.dtype))


# From the initializer, the shape, the type and the stacked dimensions of variables to how they are drawn from a seed.
_Draws = dict[tuple[WeightInit, tuple[int, ...], str, int], Callable[[tf.Tensor], tf.Tensor]]


def initial_values(specs: NestedMap, seed: tf.Tensor) -> NestedMap:
    """The initial values of a tree of VariableSpecs.

    A drawing of random numbers, a hundred operations, is traced once for all variables of a kind and a shape.
    """
    draws: _Draws | None = None if tf.executing_eagerly() else {}
    return specs.Transform(lambda spec: spec.Init(seed, draws))


def _unpacked(self: "BaseLayer", theta: NestedMap, packing: Packing) -> NestedMap:
    """PackWeights of a class that overrides a method with `theta`, which may read weights in another way."""
    warnings.warn(
        f"{self.path}: {type(self).__name__} overrides a method that reads weights, so its weights and those of its "
        "children are not packed, and a search on a CPU is slower; state PackWeights in the class: that of its base, "
        "if it reads weights as that does, or BaseLayer.PackWeights, to keep them as they are",
        stacklevel=2,
    )
    return theta


class BaseLayer:
    """The base of every layer.

    A subclass defines its Params, creates children and variables in `__init__`, and computes in
    `FProp(theta, ...)`, where `theta` is a NestedMap of tensors that mirrors the children and
    variables. Nothing is allocated and no state is kept. In a compiled program, each operation's name holds the
    path of the layer that made it: see `scoped`.

    Attributes:
        PART: the part of a model that its operations belong to in plans, e.g. 'attention'; '' takes the parent's.
        SCOPES: the parts of operations `within` scopes of its own.
        NAMES_ITS_PARTS: whether plans name it and the layers below it after it, e.g. 'encoder', if no layer above
            it does so already.
        KEEPS: the names of the activations that it marks with `Keep`, each with its kind.
    """

    PART: ClassVar[str] = ""
    SCOPES: ClassVar[Mapping[str, str]] = {}
    NAMES_ITS_PARTS: ClassVar[bool] = False
    KEEPS: ClassVar[dict[str, Kept]] = {}

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        for name, method in list(vars(cls).items()):
            scope = getattr(getattr(super(cls, cls), name, None), "scoped_in", None)
            if scope is not None:
                if not hasattr(method, "scoped_in"):
                    setattr(cls, name, scoped(method, scope))
                if "PackWeights" not in vars(cls) and cls.PackWeights is not BaseLayer.PackWeights:
                    cls.PackWeights = _unpacked  # type: ignore[method-assign]

    @classmethod
    def Params(cls) -> InstantiableParams:
        """The hyperparameters, with defaults."""
        p = InstantiableParams(cls)
        p.Define(
            "name",
            "",
            "The layer's name; a parent sets it for its children.",
            parent_sets="a part has the name of its place in the model",
        )
        p.Define(
            "dtype",
            None,
            "Type of the variables; None takes the parent's, float32 at the root.",
            checks.or_none(checks.one_of(_DTYPES)),
        )
        p.Define(
            "fprop_dtype",
            None,
            "Type of the activations, e.g. 'bfloat16'; None takes the parent's, dtype at the root.",
            checks.or_none(checks.OneOf(_DTYPES, _LATER)),
        )
        p.Define(
            "activation_split",
            None,
            "Einsum letter -> mesh axis for activations; None takes the parent's, {} at the root.",
            checks.or_none(checks.Letters(ACTIVATION_LETTERS)),
        )
        p.Define(
            "weight_split",
            None,
            "Einsum letter, or 'weight.letter', -> mesh axis for variables; None as above.",
            checks.or_none(checks.Letters(WEIGHT_LETTERS)),
        )
        p.Define(
            "shard_state",
            None,
            "What of the training state is sharded instead of copied: see `shards` in sharding/letters.py.",
            checks.or_none(checks.one_of(checks.STATE_LEVELS)),
            parent_sets="all parts of a model take it from train.shard_state",
        )
        p.Define(
            "offload",
            None,
            "What is in the memory of the hosts: see core/state/offload.py.",
            checks.or_none(checks.OFFLOAD),
            parent_sets="all parts of a model take it from train.offload",
        )
        return p

    def __init__(self, params: InstantiableParams):
        params = params.Copy()
        root = {"activation_split": {}, "weight_split": {}, "shard_state": NONE}
        for name, value in {"dtype": "float32", "offload": checks.NO_OFFLOAD, **root}.items():
            if getattr(params, name) is None:
                setattr(params, name, value)
        params.fprop_dtype = params.fprop_dtype or params.dtype
        params.name = params.name or type(self).__name__
        self.params = params.Freeze()
        self.path = params.name
        self.children = NestedMap()
        self._weights: dict[str, WeightParams] = {}

    @property
    def p(self) -> InstantiableParams:
        """Short for `params`."""
        return self.params

    @property
    def fprop_dtype(self) -> tf.DType:
        """The type of activations."""
        return tf.as_dtype(self.p.fprop_dtype)

    # --- construction

    def CreateVariable(self, name: str, weight: WeightParams) -> None:
        """Records a variable; it appears as `theta.<name>`.

        Raises:
            ValueError: a name in use, or letters that do not match the shape.
        """
        self._check_name(name)
        if len(weight.letters) != len(weight.shape):
            raise ValueError(
                f"{self.path}.{name}: letters {weight.letters!r} for shape {weight.shape}"
            )
        self._weights[name] = weight

    def CreateChild(self, name: str, params: HyperParams) -> None:
        """Makes a child layer; it appears as `self.<name>` and `theta.<name>`."""
        self._check_name(name)
        self.children[name] = self._make_child(name, params)

    def CreateChildren(self, name: str, params: Sequence[HyperParams]) -> None:
        """Makes a list of child layers; theta has a list too."""
        self._check_name(name)
        self.children[name] = [self._make_child(f"{name}_{i}", p) for i, p in enumerate(params)]

    def _make_child(self, name: str, params: HyperParams) -> "BaseLayer":
        params = params.Copy()
        params.name = name
        for key in _INHERITED:
            if getattr(params, key) is None:
                setattr(params, key, getattr(self.p, key))
        try:
            child = params.Instantiate()
        except ParamError as e:
            raise e.Within(self.p.name) from None
        child._prefix_path(self.path)
        return child

    def _prefix_path(self, prefix: str) -> None:
        self.path = f"{prefix}.{self.path}"
        for child in self.children.Flatten():
            child._prefix_path(prefix)

    def DeclaredParts(self) -> dict[str, tuple[str, str]]:
        """The part and the name of this layer and of each below it in plans, by path."""
        return self._declared_parts("", "")

    def _declared_parts(self, part: str, name: str) -> dict[str, tuple[str, str]]:
        """DeclaredParts under a parent's part and name."""
        part = self.PART or part
        name = name or (self.p.name if self.NAMES_ITS_PARTS else "")
        if name and (variant := self.Variant()):
            name = f"{name}.{variant}"
        declared = {self.path: (part, name)}
        declared |= {
            f"{self.path}.{scope}": (scope_part, name) for scope, scope_part in self.SCOPES.items()
        }
        for child in self.children.Flatten():
            declared |= child._declared_parts(part, name)
        return declared

    def DeclaredKeeps(self) -> dict[str, Kept]:
        """The `KEEPS` of the layers below this one, as they were made, and its own."""
        keeps: dict[str, Kept] = {}
        for child in tf.nest.flatten([*self.children.values()]):
            keeps |= child.DeclaredKeeps()
        return keeps | self.KEEPS

    def Variant(self) -> str:
        """A word that tells this layer from others of its stack in plans, e.g. 'moe'; '' for none."""
        return ""

    def _check_name(self, name: str) -> None:
        if name in self._weights or name in self.children or not name.isidentifier():
            raise ValueError(f"{self.path}: {name!r} is taken or is no identifier")

    def __getattr__(self, name: str) -> Any:
        children = self.__dict__.get("children", {})
        if name in children:
            return children[name]
        raise AttributeError(f"{type(self).__name__} has no attribute or child {name!r}")

    # --- variables

    def VariableSpecs(self) -> NestedMap:
        """The specs of all variables, in the structure of theta."""
        specs = NestedMap()
        for name, child in self.children.items():
            many = isinstance(child, list)
            specs[name] = [c.VariableSpecs() for c in child] if many else child.VariableSpecs()
        for name, w in self._weights.items():
            spec = VariableSpec(
                path=f"{self.path}.{name}",
                shape=tuple(w.shape),
                dtype=w.dtype or self.p.dtype,
                letters=w.letters,
                init=w.init,
                split=dims_mapping(w.letters, self.p.weight_split, name),
                trainable=w.trainable,
                is_vector=w.is_vector,
            )
            specs[name] = spec.OverCopies() if shards(self.p.shard_state, WEIGHTS) else spec
        return specs

    def ActiveParameters(self) -> int:
        """The number of parameters that take part in a token's computation: all, unless a layer chooses among some."""
        here = sum(math.prod(weight.shape) for weight in self._weights.values())
        return here + sum(child.ActiveParameters() for child in self.children.Flatten())

    def InitTheta(self, seed: tf.Tensor) -> NestedMap:
        """Initial values (pure; engines compile it, so that no host holds the model). `seed` is int32 [2]."""
        return initial_values(self.VariableSpecs(), seed)

    # --- packed weights

    @scoped
    def PackWeights(self, theta: NestedMap, packing: Packing) -> NestedMap:
        """The weights as a search on a CPU reads them: those of products are packed (kernels/weights.py).

        Here they stay as they are, those of the children too; a layer whose methods pass weights to the kernels
        overrides it. A class that overrides a method with `theta` must state it again: else it warns, and packs none.
        """
        return theta

    @scoped
    def PackChildren(self, theta: NestedMap, packing: Packing) -> NestedMap:
        """`PackWeights` of a layer that has none of its own to pack: that of its children."""
        return self._of_children(lambda child, w: child.PackWeights(w, packing), theta)

    def Grow(self, small: NestedMap, fresh: NestedMap) -> NestedMap:
        """The weights with which this layer computes what a smaller one does (see TaskGrowth.GrowsFrom).

        Here they are those of the smaller one, which has the same variables and children. A layer that has others
        overrides it.

        Args:
            small: the weights of the smaller layer; or, in place of each, a tensor of its shape or its optimizer's
                slots.
            fresh: initial weights of this layer (or slots), for those that the smaller one lacks.
        """
        return self._of_children(lambda child, *thetas: child.Grow(*thetas), small, fresh)

    def _of_children(
        self, of_child: Callable[..., NestedMap], theta: NestedMap, *more: NestedMap
    ) -> NestedMap:
        """theta, with of_child(child, its theta, its part of each of `more`) in place of each child's."""
        new = NestedMap(theta)
        for name, child in self.children.items():
            if isinstance(child, list):
                rows = zip(child, theta[name], *(tree[name] for tree in more), strict=True)
                new[name] = [of_child(*row) for row in rows]
            elif name in theta:
                new[name] = of_child(child, theta[name], *(tree[name] for tree in more))
        return new

    # --- helpers for FProp

    def ScansLayers(self) -> bool:
        """Whether FProp is a loop over stacked weights, which may lie in the host's memory."""
        return False

    @scoped
    def FProp(self, theta: NestedMap, *args: Any, **kwargs: Any) -> Any:
        """The forward computation."""
        raise NotImplementedError(f"{type(self).__name__}.FProp")

    @classmethod
    def FPropMeta(cls, params: HyperParams, *input_shapes: Sequence[int]) -> NestedMap:
        """NestedMap(flops: forward operations, out_shapes: a tuple of shapes), without building anything."""
        raise NotImplementedError(f"{cls.__name__}.FPropMeta")

    def Cast(self, weight: Weight) -> Weight:
        """A weight in the type of the activations, which packed weights have."""
        return weight if isinstance(weight, Packed) else tf.cast(weight, self.fprop_dtype)

    def Shard(self, x: tf.Tensor, letters: str) -> tf.Tensor:
        """Annotates an activation by its einsum letters and `p.activation_split`."""
        return shard_letters(x, letters, self.p.activation_split)

    def Keep(self, x: tf.Tensor, name: str, letters: str) -> tf.Tensor:
        """Marks an activation that a loop over layers may keep for its backward pass: see core/tensors.py.

        Args:
            x: the activation.
            name: one of the layer's KEEPS.
            letters: its einsum letters, by which it is sharded where it is kept.
        """
        if name not in self.KEEPS:
            raise ValueError(
                f"{self.path}: {type(self).__name__} keeps {name!r}, which its KEEPS does not declare"
            )

        def annotate(x: tf.Tensor, prefix: str = "") -> tf.Tensor:
            return self.Shard(x, prefix + letters)

        return keep(x, name, annotate)

    def FoldSeed(self, seed: tf.Tensor | None, name: str | int | tf.Tensor) -> tf.Tensor | None:
        """The seed of a child or a purpose; None stays None (inference)."""
        return None if seed is None else randomness.fold_in(seed, name)
