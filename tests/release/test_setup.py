# SPDX-License-Identifier: BSD-3-Clause
"""What setup.py says where it cannot build."""

import os
import subprocess
import sys

import pytest

from .loading import ROOT

RUN = """
import runpy, setuptools, sys, torch.utils.cpp_extension  # before they see another platform
sys.platform, sys.argv = sys.argv[1], ["setup.py", "--version"]
runpy.run_path("setup.py", run_name="__main__")
"""


def run_setup(platform="linux", **environment):
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("FUSED_OPS", "CUDA_"))}
    return subprocess.run(
        [sys.executable, "-c", RUN, platform],
        cwd=ROOT,
        env=ours | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_are_told_how_to_install_the_fallback(platform):
    done = run_setup(platform)
    assert done.returncode == 1
    assert done.stderr == (
        "fused_ops builds on Linux only; FUSED_OPS_BUILD=none installs the PyTorch fallback.\n"
    )
    assert run_setup(platform, FUSED_OPS_BUILD="none").returncode == 0


def test_cuda_is_demanded_where_there_is_no_nvcc(tmp_path):
    done = run_setup(FUSED_OPS_BUILD="cuda", CUDA_HOME=str(tmp_path))
    assert done.returncode == 1
    assert "FUSED_OPS_BUILD=cuda needs nvcc; set CUDA_HOME or pip install" in done.stderr


def test_unknown_build():
    done = run_setup(FUSED_OPS_BUILD="gpu")
    assert done.returncode == 1
    assert done.stderr == "FUSED_OPS_BUILD must be auto, cpu, cuda or none, got 'gpu'\n"
