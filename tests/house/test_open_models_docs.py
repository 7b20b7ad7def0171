"""The page of experiments has the counts of the published language models."""

from lingvo_moe.core.config import registry
from lingvo_moe.core.task.inspect import active_parameters, count_parameters
from params.lm import open_models
from tools.import_graph import ROOT


def test_the_page_has_each_models_counts_and_the_bytes_of_its_cache():
    page = (ROOT / "docs" / "experiments.md").read_text()
    models = [f"lm.{name}" for name in vars(open_models) if f"lm.{name}" in registry.AllNames()]
    assert len(models) == 15
    for name in models:
        task = registry.GetParams(name).task.Instantiate()
        total = count_parameters(task.VariableSpecs().Flatten())
        active = active_parameters(task)["with both embeddings"]
        shown = "all" if active == total else f"{active:,}"
        assert f"| `{name}` | {total:,} | {shown} | {task.CacheBytes():,} |" in page, name
