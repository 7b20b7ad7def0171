"""Stands for the package where a tool is run by its path, as in `python tools/plan.py`; see lingvo_moe/lingvo_moe."""

import importlib
import sys
from pathlib import Path

sys.modules["__main__"].__package__ = "lingvo_moe.tools"
sys.path[0] = str(Path(__file__).resolve().parents[1] / "lingvo_moe")
del sys.modules[__name__]
importlib.import_module(__name__)
