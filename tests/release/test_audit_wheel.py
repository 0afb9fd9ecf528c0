# SPDX-License-Identifier: BSD-3-Clause
"""The audit of wheels refuses what breaks each of its rules."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from .loading import load_tool

audit_wheel = load_tool("audit_wheel")
Module, Symbol = audit_wheel.Module, audit_wheel.Symbol

GOOD = Module(
    needed={"libtorch.so", "libtorch_cpu.so", "libstdc++.so.6", "libc.so.6"},
    undefined=[
        Symbol("aoti_torch_get_dim", ""),
        Symbol("torch_call_dispatcher", ""),
        Symbol("PyModule_Create2", ""),
        Symbol("_Py_NoneStruct", ""),
        Symbol("__gmon_start__", "", weak=True),
        Symbol("memcpy", "GLIBC_2.14"),
        Symbol("_ZSt4cout", "GLIBCXX_3.4"),
    ],
    architectures={"sm_75", "sm_90a", "compute_120"},
    data=b"/csrc/triplet/triplet.h /torch/include/torch/csrc/stable/library.h /dev/shm",
)
PLATFORM = "manylinux_2_28"


def test_nothing_is_wrong_with_a_good_module():
    assert not list(audit_wheel.check_libraries(GOOD))
    assert not list(audit_wheel.check_symbols(GOOD))
    assert not list(audit_wheel.check_versions(GOOD, PLATFORM))
    assert not list(audit_wheel.check_architectures(GOOD, {"sm_75", "compute_120"}))
    assert not list(audit_wheel.check_paths(Module(data=b"triplet, /csrc/svgd and /torch/include")))


@pytest.mark.parametrize("library", ["libtorch_cuda.so", "libc10.so", "libcudart.so.13"])
def test_other_libraries(library):
    (problem,) = audit_wheel.check_libraries(Module(needed={"libc.so.6", library}))
    assert problem.startswith(f"needs {library}")


@pytest.mark.parametrize("symbol", ["_ZN2at6Tensor4sizeEl", "cudaLaunchKernel", "cublasSgemm"])
def test_symbols_of_others(symbol):
    module = Module(undefined=[*GOOD.undefined, Symbol(symbol, "")])
    (problem,) = audit_wheel.check_symbols(module)
    assert symbol in problem


@pytest.mark.parametrize("version", ["GLIBC_2.34", "GLIBCXX_3.4.29", "CXXABI_1.3.13"])
def test_symbols_too_new_for_the_platform(version):
    module = Module(undefined=[Symbol("name", version)])
    (problem,) = audit_wheel.check_versions(module, PLATFORM)
    assert version in problem
    assert not list(audit_wheel.check_versions(module, "manylinux_2_34"))


def test_unknown_platform():
    (problem,) = audit_wheel.check_versions(GOOD, "linux")
    assert "platform linux: expected one of manylinux" in problem


def test_missing_architecture():
    (problem,) = audit_wheel.check_architectures(GOOD, {"sm_75", "sm_100"})
    assert problem == "has no GPU code for sm_100"


def test_architectures_of_the_build_are_expected():
    expected = audit_wheel.expected_architectures()
    assert {"sm_75", "sm_90a", "sm_120", "compute_120"} <= expected


@pytest.mark.parametrize(
    "path", [b"/home/someone/fused_ops", b"/root/.cache", b"/tmp/build", b"/opt/x/csrc/triplet.cu"]
)
def test_paths_of_the_building_machine(path):
    (problem,) = audit_wheel.check_paths(Module(data=b"\0" + path + b"\0"))
    assert path.decode() in problem


def test_size(tmp_path):
    wheel = tmp_path / "x.whl"
    wheel.write_bytes(b"0" * 100)
    assert not list(audit_wheel.check_size(wheel, 100))
    assert len(list(audit_wheel.check_size(wheel, 99))) == 1


def test_platform_of_a_name():
    name = "fused_ops-0.1.0-cp311-cp311-manylinux_2_28_x86_64.whl"
    assert audit_wheel.platform_of(Path(name)) == PLATFORM
    several = name.replace("2_28", "2_34_x86_64.manylinux_2_28")
    assert audit_wheel.platform_of(Path(several)) == PLATFORM
    assert audit_wheel.platform_of(Path(name.replace("manylinux_2_28", "linux"))) == "linux"


@pytest.fixture
def library(tmp_path):
    """A shared library that needs another one and a symbol of nobody, and says where it is from."""
    compiler = shutil.which("cc") or pytest.skip("needs a C compiler")
    other, source = tmp_path / "other.c", tmp_path / "source.c"
    other.write_text("int other(void) { return 1; }")
    source.write_text(
        'int other(void); int nobody(void); const char *from = "/home/someone/x.cpp";\n'
        "int call(void) { return other() + nobody(); }"
    )
    result = tmp_path / "_C.so"
    shared = [compiler, "-shared", "-fPIC", "-o"]
    subprocess.run([*shared, tmp_path / "libother.so", other], check=True)
    subprocess.run([*shared, result, source, f"-L{tmp_path}", "-lother"], check=True)
    return result


def test_reads_a_library(library, monkeypatch):
    monkeypatch.setattr(audit_wheel, "read_architectures", lambda path: {"sm_75"})
    module = audit_wheel.read_module(library)
    assert "libother.so" in module.needed
    symbols = {symbol.name: symbol for symbol in module.undefined}
    assert symbols["nobody"] == Symbol("nobody", "")
    assert module.architectures == {"sm_75"}
    assert len(list(audit_wheel.check_libraries(module))) == 1
    assert len(list(audit_wheel.check_symbols(module))) == 2
    assert any("/home/someone" in problem for problem in audit_wheel.check_paths(module))


# `make audit` installs it, and so do the jobs that build wheels.
@pytest.mark.skipif(
    not all((Path(sys.executable).parent / name).exists() for name in ("twine", "torch-abi-audit")),
    reason="needs the extra `release`",
)
def test_bad_wheel_is_refused(library, tmp_path, capsys, monkeypatch):
    wheel = tmp_path / "fused_ops-0.1.0-cp311-cp311-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(library, "fused_ops/_C.so")
    monkeypatch.setattr(sys, "argv", ["audit_wheel.py", "--platform", "manylinux_2_34", str(wheel)])
    assert audit_wheel.main() == 1
    printed = capsys.readouterr().out
    for problem in ("libother.so", "nobody", "sm_75", "/home/someone", "twine", "is for"):
        assert problem in printed
