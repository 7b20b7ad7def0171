"""The page of experiments has the counts of the published language models."""

from lingvo_moe.core.config import registry
from lingvo_moe.core.task.inspect import active_parameters, count_parameters
from lingvo_moe.params.lm.measured_models import Measured
from lingvo_moe.params.lm.open_models import OpenModel
from tools.import_graph import ROOT

PAGE = (ROOT / "docs" / "experiments.md").read_text()


def _models(base):
    """The experiments that derive from a class of the package, but for one of any size and the demo."""
    others = ("lm.ImportedLlama", "lm.ImportedMixtral", "lm.MoEDemo")
    derived = [n for n in registry.AllNames("lm") if issubclass(registry.GetExperiment(n), base)]
    return [name for name in derived if name not in others]


def test_the_page_has_each_models_counts_and_the_bytes_of_its_cache():
    measured = _models(Measured)
    models = [name for name in _models(OpenModel) if name not in measured]
    assert len(models) == 18
    for name in models:
        task = registry.GetParams(name).task.Instantiate()
        total = count_parameters(task.VariableSpecs().Flatten())
        active = max(active_parameters(task).values())
        shown = "all" if active == total else f"{active:,}"
        assert f"| `{name}` | {total:,} | {shown} | {task.Costs().CacheBytes():,} |" in PAGE, name


def test_the_page_has_counts_rows_and_meshes_of_models_with_measured_steps():
    models = _models(Measured)
    assert len(models) == 10
    for name in models:
        p = registry.GetParams(name)
        total = count_parameters(p.task.Instantiate().VariableSpecs().Flatten())
        rows = f"{p.input.batch_size} x {p.input.target_length}"
        assert f"| `{name}` | {total:,} | {rows} | `{p.train.mesh}` |" in PAGE, name
