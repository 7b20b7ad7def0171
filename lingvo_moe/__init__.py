"""GShard for TensorFlow 2: Mixture-of-Experts Transformers, annotated once and partitioned by XLA on any devices.

`lingvo_moe.api` has the public names. Modules that had another name in an older version are imported by it for a
release, with a warning.
"""

import importlib
import importlib.util
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

# `params`, `reproduction` and `tools` lie inside this package in a wheel, and beside it in a checkout. They are
# lingvo_moe.params, ... in both, so that directories of the user's with these names are never taken for them.
if not Path(__file__).with_name("params").is_dir():
    __path__.append(str(Path(__file__).parents[1]))

# The module that core/engine/program_analysis.py asks about programs; core imports nothing of `analysis`.
PROGRAM_ANALYSIS = "lingvo_moe.analysis.programs.for_engines"

_CORE, _ANALYSIS = "lingvo_moe.core", "lingvo_moe.analysis"
# Old names of modules and packages; what lies in a package moved with it. Those of modules with classes stay, since the
# parameters of older runs name them.
MOVED = {
    **{f"{_CORE}.{n}": f"{_CORE}.config.{n}" for n in ("registry", "hyperparams", "checks", "class_names")},
    f"{_CORE}.base_input": f"{_CORE}.input.base_input",
    f"{_CORE}.optimizers.base": f"{_CORE}.optimizers.base_optimizer",
    **{f"{_CORE}.moe.{n}": f"{_CORE}.moe.routers.{n}" for n in ("losses_and_metrics", "slots")},
    f"{_CORE}.base_task": f"{_CORE}.task.base_task",
    f"{_CORE}.engine.loop.interrupt": f"{_CORE}.console.interrupt",
    f"{_CORE}.engine.aot": f"{_ANALYSIS}.programs.aot",
    f"{_CORE}.engine.checking": f"{_ANALYSIS}.programs.checking",
    f"{_CORE}.engine.collectives": f"{_ANALYSIS}.programs.hlo.collective_list",
    f"{_CORE}.kernels.tpu": f"{_CORE}.kernels.pallas.tpu",
    **{f"{_CORE}.planner.{n}": f"{_ANALYSIS}.plans.machines.base_machine" for n in ("errors", "machines.base")},
    **{f"{_CORE}.planner.{n}": f"{_ANALYSIS}.plans.work.{n}" for n in ("costs", "flops", "traffic")},
    f"{_CORE}.planner.machines.prices": f"{_ANALYSIS}.plans.prices",
    f"{_CORE}.planner.network.mesh_order": f"{_ANALYSIS}.plans.mesh_order",
    **{f"{_CORE}.{n}": f"{_ANALYSIS}.programs.{n}" for n in ("hlo", "partitioner")},
    f"{_CORE}.planner": f"{_ANALYSIS}.plans",
    **{f"{_CORE}.{n}": f"{_ANALYSIS}.search.{n}" for n in ("strategies", "auto_shard", "operators")},
    **{f"lingvo_moe.planning.{n}": f"{_ANALYSIS}.search.{n}" for n in ("parallelizing", "layouts", "result_cache")},
    "lingvo_moe.planning.found_strategy": "lingvo_moe.training.found_strategy",
    "lingvo_moe.planning": f"{_ANALYSIS}.plans",
    "lingvo_moe.inspecting": f"{_ANALYSIS}.explain",
    **{f"lingvo_moe.tasks.{n}.model": f"lingvo_moe.tasks.{n}.{n}_model" for n in ("image", "lm", "mt")},
    "lingvo_moe.tasks.image.input.pipeline": "lingvo_moe.tasks.image.input.image_input",
    "lingvo_moe.tasks.mt.input": "lingvo_moe.tasks.mt",
    "lingvo_moe.tasks.mt.input.pipeline": "lingvo_moe.tasks.mt.mt_input",
    f"{_CORE}.moe.dispatch_index": f"{_CORE}.moe.dispatch",
    "lingvo_moe.params.lm.demo": "lingvo_moe.params.lm.small",
    f"{_CORE}.task.named_rows": f"{_CORE}.task.task_growth",
    "lingvo_moe.tasks.transformer_task": "lingvo_moe.tasks.transformer.task",
    "lingvo_moe.tasks.experts": "lingvo_moe.tasks.transformer.experts",
    "lingvo_moe.training.meshes": f"{_CORE}.task.meshes",
    "lingvo_moe.training.recomputing": f"{_ANALYSIS}.plans.recomputing",
}  # fmt: skip


def current_name(module: str) -> str:
    """The name that a module of an older version has now; its own where it did not move."""
    package, rest = module, ""
    while package.startswith("lingvo_moe."):
        if package in MOVED:
            return MOVED[package] + rest
        package, _, last = package.rpartition(".")
        rest = f".{last}{rest}"
    return module


class _MovedModules(MetaPathFinder, Loader):
    """Imports moved modules under both names as one module."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if current_name(fullname) == fullname:
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        text = f"{name} is {current_name(name)} now; the old name goes with the next release"
        warnings.warn(text, FutureWarning, stacklevel=2)
        sys.modules[name] = importlib.import_module(current_name(name))


# Before the other finders, which would load a module of a moved package a second time, by its old name.
sys.meta_path.insert(0, _MovedModules())
