# SPDX-License-Identifier: BSD-3-Clause
"""Loads the native module, or says why it is not there.

`native` is the module fused_ops._C, whose import also registers torch.ops.fused_ops.*, or None;
`why_not` is then the reason. Environment:

FUSED_OPS_DISABLE_NATIVE=1  do not load it: everything runs in PyTorch
FUSED_OPS_REQUIRE_NATIVE=1  raise ImportError instead of warning when it cannot be loaded
"""

import importlib
import os
import sys
import warnings
from types import ModuleType

import torch

OLDEST_TORCH = (2, 10)


def _cause_and_fix() -> tuple[ModuleType | None, str]:
    """The native module, or None with what is wrong and what to do about it."""
    if os.environ.get("FUSED_OPS_DISABLE_NATIVE") == "1":
        return None, "FUSED_OPS_DISABLE_NATIVE=1 is set"
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        return None, (
            f"torch {torch.__version__} is too old, 2.10 or newer is needed. "
            "Fix: pip install --upgrade torch"
        )
    if sys.platform != "linux":
        return None, (
            f"the kernels are for Linux and this is {sys.platform}. "
            "Fix: FUSED_OPS_DISABLE_NATIVE=1 hides this, and WSL runs the kernels on Windows"
        )
    try:
        return importlib.import_module("fused_ops._C"), ""
    except ModuleNotFoundError:
        return None, (
            "this installation has no compiled module. Fix: pip install --force-reinstall "
            "fused_ops, or in a source tree: make build"
        )
    except ImportError as error:
        return None, (
            f"the compiled module does not load ({error}). "
            "Fix: pip install --force-reinstall fused_ops"
        )


native, why_not = _cause_and_fix()

if native is None:
    if os.environ.get("FUSED_OPS_REQUIRE_NATIVE") == "1":
        raise ImportError(f"fused_ops: FUSED_OPS_REQUIRE_NATIVE=1 is set, but {why_not}")
    if os.environ.get("FUSED_OPS_DISABLE_NATIVE") != "1":
        warnings.warn(
            f"fused_ops runs in plain PyTorch, because {why_not}", RuntimeWarning, stacklevel=2
        )
