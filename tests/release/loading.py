# SPDX-License-Identifier: BSD-3-Clause
"""The scripts of tools/ as modules: they are in no package."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def load_tool(name):
    specification = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    # Known by its name before it runs, as dataclasses want it.
    module = sys.modules[name] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module
