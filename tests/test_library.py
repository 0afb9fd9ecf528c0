# SPDX-License-Identifier: BSD-3-Clause
"""Loading the native module and what is said where it cannot be, which belongs to no op."""

import importlib
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fused_ops
from fused_ops import _library, _support, env_info

PACKAGE = Path(fused_ops.__file__).parent

HIDE = """
import sys
sys.modules["fused_ops._C"] = None  # its import now raises ModuleNotFoundError
"""

CALL = """
import warnings
import torch
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import fused_ops
print(*(str(warning.message) for warning in caught), sep="\\n", end="|")
inputs = [torch.arange(6.0).view(2, 3).roll(i, 1).requires_grad_() for i in range(3)]
mode = fused_ops.set_fallback.mode
with fused_ops.set_fallback("allow"):
    loss = fused_ops.triplet_margin_loss(*inputs)
loss.backward()
expected = torch.nn.functional.triplet_margin_loss(*inputs)
assert torch.allclose(loss, expected) and inputs[0].grad.any()
print(fused_ops.explain(fused_ops.triplet_margin_loss, *inputs), end="|")
print(mode, end="|")
print(hasattr(torch.ops.fused_ops, "triplet_forward"), torch.cuda.is_initialized(), sep="|")
"""


def run(code, cwd=None, **environment):
    ours = {k: v for k, v in os.environ.items() if not k.startswith("FUSED_OPS")}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=ours | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def results_of(process):
    assert process.returncode == 0, process.stderr
    return process.stdout.strip().split("|")


def test_import_is_silent_and_creates_no_cuda_context():
    warnings, explained, mode, native, initialised = results_of(run(CALL))
    assert (warnings, mode, native, initialised) == ("", "allow", "True", "False")
    assert explained == "triplet_margin_loss: fused (device=cpu, dtype=float32)"


def test_import_does_not_bring_the_compiler_along():
    """It takes a second to import, and most programs never use it."""
    process = subprocess.run(
        [sys.executable, "-c", "import sys, fused_ops; print('torch._dynamo' in sys.modules)"],
        capture_output=True,
        text=True,
    )
    assert process.stdout.strip() == "False", process.stderr


def test_native_module_can_be_left_out():
    process = run(CALL, FUSED_OPS_DISABLE_NATIVE="1", FUSED_OPS_FALLBACK="error")
    warnings, explained, mode, native, _ = results_of(process)
    assert (warnings, mode, native) == ("", "error", "False")
    assert explained == "triplet_margin_loss: pytorch, because FUSED_OPS_DISABLE_NATIVE=1 is set"


def test_missing_native_module_warns_once_with_cause_and_fix():
    warnings, explained, _, native, _ = results_of(run(HIDE + CALL))
    assert native == "False"
    assert warnings.count("\n") == 0
    for text in ("plain PyTorch", "no compiled module", "Fix: pip install", "make build"):
        assert text in warnings
    assert "no compiled module" in explained


def test_broken_native_module_is_an_error_where_it_is_required(tmp_path):
    """A copy of the package in the folder where the process starts comes before the real one."""
    copy = tmp_path / "fused_ops"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    (copy / f"_C{suffix}").write_bytes(b"not a library")
    process = run("import fused_ops", tmp_path, FUSED_OPS_REQUIRE_NATIVE="1")
    assert process.returncode == 1
    last = process.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: fused_ops: FUSED_OPS_REQUIRE_NATIVE=1 is set, but")
    assert "does not load (" in last
    assert "Fix: pip install" in last


# The rest runs the loader again in this process, under another name.


def reload_library():
    return runpy.run_path(_library.__file__)


def raise_import_error(name):
    raise ImportError(f"libtorch.so: cannot open shared object file, for {name}")


@pytest.fixture
def loader(monkeypatch):
    for name in ("FUSED_OPS_REQUIRE_NATIVE", "FUSED_OPS_DISABLE_NATIVE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


CAUSES = {
    "missing": (
        lambda patch: patch.setitem(sys.modules, "fused_ops._C", None),
        "no compiled module",
    ),
    "broken": (
        lambda patch: patch.setattr(importlib, "import_module", raise_import_error),
        r"does not load \(libtorch.so: cannot open .*\)\. Fix: pip install",
    ),
    "old torch": (
        lambda patch: patch.setattr(torch, "__version__", "2.9.1+cu128"),
        r"torch 2\.9\.1\+cu128 is too old, .* Fix: pip install --upgrade torch",
    ),
    "macOS": (
        lambda patch: patch.setattr(sys, "platform", "darwin"),
        "for Linux and this is darwin. Fix: FUSED_OPS_DISABLE_NATIVE=1 hides this",
    ),
    "Windows": (
        lambda patch: patch.setattr(sys, "platform", "win32"),
        "for Linux and this is win32. Fix: .* WSL runs the kernels on Windows",
    ),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_why_the_native_module_is_not_there(loader, cause):
    break_it, message = CAUSES[cause]
    assert reload_library()["native"] is fused_ops._C
    break_it(loader)
    with pytest.warns(RuntimeWarning, match=f"plain PyTorch, because .*{message}") as caught:
        assert reload_library()["native"] is None
    assert len(caught) == 1
    loader.setenv("FUSED_OPS_REQUIRE_NATIVE", "1")
    with pytest.raises(ImportError, match=message):
        reload_library()


@pytest.mark.parametrize("version", ["2.10.0", "2.13.0a0+git1234", "3.0.0", "10.1"])
def test_newer_torch_is_not_refused(loader, version):
    loader.setattr(torch, "__version__", version)
    assert reload_library()["native"] is fused_ops._C


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        ("9.0", (9, 0), True),
        ("9.0", (8, 9), False),
        ("9.0", (10, 0), False),
        ("8.0", (8, 6), True),  # a minor version up
        ("8.6", (8, 0), False),  # not down
        ("7.5 8.0 8.6", (8, 9), True),
        ("7.5 8.0 8.6", (9, 0), False),
        ("7.5 8.0+PTX", (12, 0), True),
        ("12.0+PTX", (10, 3), False),
        ("7.5;8.0+PTX", (9, 0), True),
        ("9.0a", (9, 0), True),
        ("7.5 8.0 8.6 8.9 9.0 10.0 12.0+PTX", (7, 0), False),
        ("", (9, 0), False),
    ],
)
def test_architectures(architectures, capability, runs):
    assert _support.runs_on(architectures, capability) is runs


@pytest.mark.parametrize(
    ("cuda", "driver", "architectures", "text"),
    [
        (
            "",
            (13, 0),
            "",
            "this build has no CUDA kernels, .* Fix: install a wheel, or build with CUDA_HOME",
        ),
        ("13.0", (12, 8), "8.0", r"driver runs CUDA up to 12\.8, .* needs 13\.0\. Fix: update the"),
        (
            "13.0",
            (13, 0),
            "9.0",
            r"no kernels for compute capability 8\.9, only for 9\.0\. Fix: build with",
        ),
        ("13.0", (13, 2), "8.0 9.0", None),
    ],
)
def test_reasons_against_the_cuda_kernels(monkeypatch, cuda, driver, architectures, text):
    info = {"cuda": cuda, "architectures": architectures}
    native = SimpleNamespace(build_info=lambda: info, driver_cuda_version=lambda: driver)
    monkeypatch.setattr(_support, "native", native)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 9))
    monkeypatch.setattr(_support, "_known_cuda_reasons", {})
    if text is None:
        assert _support.cuda_reasons(0) == ()
        return
    with pytest.warns(RuntimeWarning, match=f"plain PyTorch, because .*{text}") as caught:
        (reason,) = _support.cuda_reasons(0)
        assert _support.cuda_reasons(0) == (reason,)
    assert len(caught) == 1
    assert reason in str(caught[0].message)


def test_env_info(monkeypatch, capsys):
    facts = env_info.collect()
    assert (facts["torch"], facts["fused_ops"]) == (torch.__version__, fused_ops.__version__)
    assert facts["native_loaded"]
    assert not facts["broken"]
    row = facts["paths"]["cpu"]["triplet_margin_loss"]
    assert all(row[name] == "fused" for name in fused_ops._C.DTYPES)
    losses = "triplet_margin_loss", "triplet_margin_loss_indexed", "batch_triplet_loss"
    assert facts["self_test"]["cpu"] == dict.fromkeys([*losses, "svgd_phi"], "passed")
    monkeypatch.setattr(sys, "argv", ["env_info"])
    assert env_info.main() == 0
    assert f"torch          {torch.__version__}" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["env_info", "--json"])
    for module in (env_info, _support):
        monkeypatch.setattr(module, "native", None)
        monkeypatch.setattr(module, "why_not", "it is gone")
    assert env_info.main() == 1
    facts = json.loads(capsys.readouterr().out)
    assert (facts["native_loaded"], facts["native_problem"]) == (False, "it is gone")
    assert facts["paths"]["cpu"]["triplet_margin_loss"]["float32"] == "pytorch; it is gone"


def test_env_info_finds_wrong_results(monkeypatch, capsys):
    monkeypatch.setattr(fused_ops, "svgd_phi", lambda particles, score: score)
    monkeypatch.setattr(sys, "argv", ["env_info"])
    assert env_info.main() == 1
    printed = capsys.readouterr().out
    assert "self-test    passed" in printed
    assert "self-test    FAILED: AssertionError: Tensor-likes are not close!" in printed


@pytest.mark.skipif(not fused_ops._C.build_info()["cuda"], reason="built without CUDA")
def test_the_driver_is_asked_without_a_context():
    version = fused_ops._C.driver_cuda_version()
    assert len(version) == 2
    assert (version > (0, 0)) >= torch.cuda.is_available()
    assert not torch.cuda.is_available() or version >= (13, 0)


def test_public_names():
    assert set(fused_ops.__all__) <= set(dir(fused_ops))
    assert all(getattr(fused_ops, name).__doc__ for name in fused_ops.__all__)


def test_build_info():
    info = fused_ops._C.build_info()
    assert {"cuda", "architectures", "compiler", "torch_target"} <= info.keys()
    assert bool(info["cuda"]) == bool(info["architectures"])
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        assert _support.runs_on(info["architectures"], capability)
