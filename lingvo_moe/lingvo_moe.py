"""Stands for the package where a file of this directory is run by its path, as in `python lingvo_moe/trainer.py`.

Python then looks for modules in this directory; this one makes it look where `python -m` does.
"""

import importlib
import os
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
sys.path[:] = [
    str(_HERE.parent),
    *(p for p in sys.path if p not in ("", str(_HERE))),
    os.getcwd(),
]
del sys.modules[__name__]
importlib.import_module(__name__)
