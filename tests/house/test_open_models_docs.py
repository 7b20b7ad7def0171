"""The page of experiments has the counts of the published language models."""

from lingvo_moe.core.config import registry
from lingvo_moe.core.task.inspect import active_parameters, count_parameters
from params.lm import measured_models, open_models
from tools.import_graph import ROOT

PAGE = (ROOT / "docs" / "experiments.md").read_text()


def _models(module):
    return [f"lm.{name}" for name in vars(module) if f"lm.{name}" in registry.AllNames()]


def test_the_page_has_each_models_counts_and_the_bytes_of_its_cache():
    models = _models(open_models)
    assert len(models) == 16
    for name in models:
        task = registry.GetParams(name).task.Instantiate()
        total = count_parameters(task.VariableSpecs().Flatten())
        active = active_parameters(task)["with both embeddings"]
        shown = "all" if active == total else f"{active:,}"
        assert f"| `{name}` | {total:,} | {shown} | {task.Costs().CacheBytes():,} |" in PAGE, name


def test_the_page_has_counts_rows_and_meshes_of_models_with_measured_steps():
    models = _models(measured_models)
    assert len(models) == 10
    for name in models:
        p = registry.GetParams(name)
        total = count_parameters(p.task.Instantiate().VariableSpecs().Flatten())
        rows = f"{p.input.batch_size} x {p.input.target_length}"
        assert f"| `{name}` | {total:,} | {rows} | `{p.train.mesh}` |" in PAGE, name
