"""The public names: what a model, a router, an optimizer or a script outside this package needs.

    from lingvo_moe import api

    class Mine(api.BaseLayer): ...

docs/api.md says what each is. A name here stays through moves of modules. Its module is imported when it is first asked
for, so that `import lingvo_moe.api` needs neither TensorFlow nor JAX.
"""

import ast
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

# The table of public names. Type checkers and editors follow these imports; at run time this module reads them as text.
if TYPE_CHECKING:
    from lingvo_moe.analysis.explain.explaining import (
        explain as explain,
        get_sharding as get_sharding,
    )
    from lingvo_moe.analysis.explain.verifying import verify as verify
    from lingvo_moe.analysis.plans.step_plan import Request as Request, make_plan as make_plan
    from lingvo_moe.analysis.search.auto_shard.function import auto_shard as auto_shard
    from lingvo_moe.core import kernels as kernels, sharding as sharding
    from lingvo_moe.core.base_layer import (
        BaseLayer as BaseLayer,
        VariableSpec as VariableSpec,
        WeightParams as WeightParams,
        within as within,
    )
    from lingvo_moe.core.config import checks as checks, registry as registry
    from lingvo_moe.core.config.hyperparams import (
        InstantiableParams as InstantiableParams,
        ParamError as ParamError,
        Params as Params,
    )
    from lingvo_moe.core.config.registry import (
        Experiment as Experiment,
        GetParams as GetParams,
        Register as Register,
    )
    from lingvo_moe.core.decode.flat_beam_search import FlatBeamSearch as FlatBeamSearch
    from lingvo_moe.core.engine import engines as engines
    from lingvo_moe.core.engine.base import Compiled as Compiled, Engine as Engine
    from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer as Checkpointer
    from lingvo_moe.core.engine.checkpoints.run_weights import Chosen as Chosen
    from lingvo_moe.core.engine.devices import request_cpu_devices as request_cpu_devices
    from lingvo_moe.core.engine.eager.functional import shard_function as shard_function
    from lingvo_moe.core.engine.eager.testing import (
        run_sharded as run_sharded,
        run_single as run_single,
    )
    from lingvo_moe.core.engine.lowering.lowering import lower as lower
    from lingvo_moe.core.engine.lowering.program import Program as Program
    from lingvo_moe.core.engine.lowering.specs import (
        TensorSpec as TensorSpec,
        map_with_specs as map_with_specs,
    )
    from lingvo_moe.core.engine.pjrt import PjrtEngine as PjrtEngine
    from lingvo_moe.core.initializers import WeightInit as WeightInit
    from lingvo_moe.core.input.base_input import (
        ArraySpec as ArraySpec,
        BaseInput as BaseInput,
        BatchIterator as BatchIterator,
        HeldOutBatch as HeldOutBatch,
    )
    from lingvo_moe.core.layers.convolution import Conv2D as Conv2D
    from lingvo_moe.core.layers.feed_forward import ACTIVATIONS as ACTIVATIONS
    from lingvo_moe.core.layers.positions import (
        Positions as Positions,
        Rotary as Rotary,
        ScoreBias as ScoreBias,
    )
    from lingvo_moe.core.layers.softmax import Softmax as Softmax
    from lingvo_moe.core.moe.dispatch import Dispatcher as Dispatcher
    from lingvo_moe.core.moe.layer import MoELayer as MoELayer
    from lingvo_moe.core.moe.routers.base import LearnedRouter as LearnedRouter, Router as Router
    from lingvo_moe.core.moe.routers.losses_and_metrics import (
        Choice as Choice,
        noting_choices as noting_choices,
        recorded_experts as recorded_experts,
    )
    from lingvo_moe.core.moe.routers.slots import top_k as top_k
    from lingvo_moe.core.nested_map import NestedMap as NestedMap
    from lingvo_moe.core.optimizers import schedules as schedules
    from lingvo_moe.core.optimizers.adafactor import (
        Adafactor as Adafactor,
        GShardAdafactor as GShardAdafactor,
    )
    from lingvo_moe.core.optimizers.adam import Adam as Adam, AdamW as AdamW
    from lingvo_moe.core.optimizers.base_optimizer import (
        BaseOptimizer as BaseOptimizer,
        slot_spec as slot_spec,
    )
    from lingvo_moe.core.optimizers.schedules import LearningRateSchedule as LearningRateSchedule
    from lingvo_moe.core.optimizers.sgd import Sgd as Sgd
    from lingvo_moe.core.pipeline.layers import (
        PipeliningLayer as PipeliningLayer,
        SeqLayer as SeqLayer,
    )
    from lingvo_moe.core.pipeline.partition import (
        PartitionSequentialLayers as PartitionSequentialLayers,
        partition_of as partition_of,
    )
    from lingvo_moe.core.pipeline.parts import Context as Context
    from lingvo_moe.core.randomness import fold_in as fold_in, make_seed as make_seed
    from lingvo_moe.core.runs.run_dir import RunDir as RunDir
    from lingvo_moe.core.sharding.annotate import (
        mesh_split as mesh_split,
        replicate as replicate,
        shard as shard,
        split as split,
    )
    from lingvo_moe.core.sharding.looped_einsum import looped_einsum as looped_einsum
    from lingvo_moe.core.sharding.manual import (
        all_reduce as all_reduce,
        auto_to_manual as auto_to_manual,
        device_index as device_index,
        manual_region as manual_region,
        manual_to_auto as manual_to_auto,
        rotate as rotate,
    )
    from lingvo_moe.core.sharding.mesh import (
        Mesh as Mesh,
        ShardingError as ShardingError,
        current_mesh as current_mesh,
        single_device as single_device,
        use_mesh as use_mesh,
    )
    from lingvo_moe.core.sharding.redistribution import redistribute as redistribute
    from lingvo_moe.core.task.base_task import BaseTask as BaseTask
    from lingvo_moe.core.task.task_costs import TaskCosts as TaskCosts
    from lingvo_moe.core.task.task_growth import TaskGrowth as TaskGrowth
    from lingvo_moe.core.task.task_metrics import TaskMetrics as TaskMetrics
    from lingvo_moe.core.task.task_strategy import TaskStrategy as TaskStrategy
    from lingvo_moe.core.tensors import Kept as Kept
    from lingvo_moe.tasks.image.image_model import ImageClassifier as ImageClassifier
    from lingvo_moe.tasks.image.input.image_input import FolderInput as FolderInput
    from lingvo_moe.tasks.lm.generator import (
        GenerateOptions as GenerateOptions,
        load_generator as load_generator,
    )
    from lingvo_moe.tasks.lm.lm_model import LmModel as LmModel
    from lingvo_moe.tasks.lm.text_input import LmInput as LmInput
    from lingvo_moe.tasks.mt.decoding.translator import (
        TranslateOptions as TranslateOptions,
        load_translator as load_translator,
    )
    from lingvo_moe.tasks.mt.mt_input import MtInput as MtInput
    from lingvo_moe.tasks.mt.mt_model import MtModel as MtModel
    from lingvo_moe.tasks.mt.quality.scoring import (
        count_train_pairs as count_train_pairs,
        evaluate as evaluate,
    )
    from lingvo_moe.tasks.text.data.dev_set import DevSet as DevSet
    from lingvo_moe.tasks.text.preparing.formats import FORMATS as FORMATS, Format as Format
    from lingvo_moe.tasks.text.quality.forced_decoding import Scorer as Scorer
    from lingvo_moe.tasks.transformer.stacks import TaskStack as TaskStack, sizes_of as sizes_of
    from lingvo_moe.tasks.transformer.task import TransformerTask as TransformerTask


def _modules() -> dict[str, str]:
    """The module of each public name: `registry` and `checks` are modules themselves."""
    tree = ast.parse(Path(__file__).read_text("utf-8"))
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return {
        alias.name: node.module
        for node in imports
        for alias in node.names
        if node.module and node.module.startswith("lingvo_moe.")
    }


if not TYPE_CHECKING:  # which knows these names
    _MODULES = _modules()
    __all__ = sorted(_MODULES)

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(_MODULES[name])
        if not hasattr(module, name):  # a module of a package
            importlib.import_module(f"{_MODULES[name]}.{name}")
        value = globals()[name] = getattr(module, name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULES})
