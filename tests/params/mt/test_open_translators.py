"""Published translators have the parameters that follow from their published sizes, to the unit."""

import pytest

from lingvo_moe.core.config import registry
from lingvo_moe.core.task.inspect import active_parameters, count_parameters
from tools.import_graph import ROOT

TABLE = {
    "M2M100_418M": (483_905_536, None),
    "M2M100_1_2B": (1_239_470_080, None),
    "NLLB200Distilled600M": (615_073_792, None),
    "NLLB200_1_3B": (1_370_638_336, None),
    "NLLB200_3_3B": (3_344_863_232, None),
    "NLLBMoE54B": (54_500_569_088, 3_750_785_024),
}


@pytest.mark.parametrize("name", TABLE)
def test_counts_are_exact_and_on_the_page(name):
    total, active = TABLE[name]
    task = registry.GetParams(f"mt.{name}").task.Instantiate()
    assert count_parameters(task.VariableSpecs().Flatten()) == total
    assert active_parameters(task)["with embeddings"] == (active or total)
    assert f"{total:,} parameters" in registry.GetExperiment(f"mt.{name}").__doc__
    shown = f"{active:,}" if active else "all"
    page = (ROOT / "docs" / "experiments.md").read_text()
    assert f"| `mt.{name}` | {total:,} | {shown} |" in page
