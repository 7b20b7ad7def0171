"""The packages of the wheel, with `params`, `reproduction` and `tools` inside `lingvo_moe` (see its __init__.py)."""

from setuptools import find_packages, setup

_INSIDE = ["params", "reproduction", "tools"]

_beside = find_packages(include=[pattern for name in _INSIDE for pattern in (name, f"{name}.*")])
setup(
    packages=[
        *find_packages(include=["lingvo_moe", "lingvo_moe.*"]),
        *(f"lingvo_moe.{name}" for name in _beside),
    ],
    package_dir={f"lingvo_moe.{name}": name for name in _INSIDE},
)
