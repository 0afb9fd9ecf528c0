# SPDX-License-Identifier: BSD-3-Clause
"""Refuses wheels that would not install and run wherever they claim to.

    python tools/audit_wheel.py dist/*.whl
    python tools/audit_wheel.py --platform manylinux_2_28 dist/*.whl    (what is released)

Prints what is wrong, and exits with 1 if anything is. Needs the packages of the extra `release`.
"""

import argparse
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from elftools.elf.elffile import ELFFile

ROOT = Path(__file__).resolve().parents[1]
LARGEST_WHEEL = 12 * 2**20

# Everything else would have to be on the user's machine in the right version.
LIBRARIES = {
    "libtorch.so", "libtorch_cpu.so", "libstdc++.so.6", "libgcc_s.so.1", "libm.so.6", "libc.so.6",
    "libdl.so.2", "libpthread.so.0", "librt.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1",
}  # fmt: skip
# libtorch's C shim and CPython; what else is undefined must carry the version of a system library.
UNVERSIONED = re.compile(r"(aoti_torch_|torch_|_?Py)\w+")

# The newest symbols of the system libraries that a platform tag allows (PEP 600, and what GCC of
# that age came with).
CEILINGS = {
    "manylinux_2_28": {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11)},
    "manylinux_2_34": {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13)},
    "manylinux_2_35": {"GLIBC": (2, 35), "GLIBCXX": (3, 4, 30), "CXXABI": (1, 3, 13)},
}
# An absolute path to a source or header, or into somebody's home, tells of the building machine.
BUILD_PATHS = re.compile(
    rb"/(?:home|root|Users|tmp|work|project|github)/[\w./+-]+|(?<![\w.+-])/[\w./+-]+\.(?:cu|cuh|cpp|hpp)\b"
)


@dataclass
class Symbol:
    name: str
    version: str  # such as GLIBC_2.17, or empty
    weak: bool = False


@dataclass
class Module:
    """What the rules need to know of a shared library."""

    needed: set[str] = field(default_factory=set)
    undefined: list[Symbol] = field(default_factory=list)
    architectures: set[str] = field(default_factory=set)  # such as sm_90a, and compute_120 for PTX
    data: bytes = b""


def read_module(path: Path) -> Module:
    with path.open("rb") as file:
        elf = ELFFile(file)
        dynamic = elf.get_section_by_name(".dynamic")
        needed = {tag.needed for tag in dynamic.iter_tags() if tag.entry.d_tag == "DT_NEEDED"}
        undefined = list(_undefined(elf))
    return Module(needed, undefined, read_architectures(path), path.read_bytes())


def _undefined(elf: ELFFile) -> Iterator[Symbol]:
    versions = elf.get_section_by_name(".gnu.version")
    requirements = elf.get_section_by_name(".gnu.version_r")
    for index, symbol in enumerate(elf.get_section_by_name(".dynsym").iter_symbols()):
        if symbol.entry.st_shndx != "SHN_UNDEF" or not symbol.name:
            continue
        version = ""
        number = versions.get_symbol(index).entry.ndx if versions else None
        if isinstance(number, int) and (found := requirements.get_version(number & 0x7FFF)):
            version = found[1].name
        yield Symbol(symbol.name, version, symbol.entry.st_info.bind == "STB_WEAK")


def read_architectures(path: Path) -> set[str]:
    """The GPU code in a library, by cuobjdump of the package nvidia-cuda-cuobjdump."""
    program = next(Path(sysconfig.get_path("purelib")).glob("nvidia/**/bin/cuobjdump"))
    found = set()
    for option, pattern, name in (
        ("--list-elf", r"\.(sm_\w+)\.cubin", "{}"),
        ("--list-ptx", r"\.sm_(\w+)\.ptx", "compute_{}"),
    ):
        done = subprocess.run([program, option, path], capture_output=True, text=True)
        found |= {name.format(match) for match in re.findall(pattern, done.stdout)}
    return found


def expected_architectures() -> set[str]:
    """Those of ARCHITECTURES in setup.py."""
    listed = re.search(r'^ARCHITECTURES = "(.*?)"', (ROOT / "setup.py").read_text(), re.M)[1]
    expected = set()
    for architecture in listed.split():
        number = architecture.removesuffix("+PTX").replace(".", "")
        expected.add(f"sm_{number}")
        if architecture.endswith("+PTX"):
            expected.add(f"compute_{number}")
    return expected


def check_libraries(module: Module) -> Iterator[str]:
    for library in sorted(module.needed - LIBRARIES):
        yield f"needs {library}, which is neither torch's nor every system's"


def check_symbols(module: Module) -> Iterator[str]:
    for symbol in module.undefined:
        if not symbol.version and not symbol.weak and not UNVERSIONED.fullmatch(symbol.name):
            yield f"undefined symbol {symbol.name} is not in libtorch's C shim, CPython or libc"


def check_versions(module: Module, platform: str) -> Iterator[str]:
    if platform not in CEILINGS:
        yield f"platform {platform}: expected one of {', '.join(CEILINGS)}"
        return
    for symbol in module.undefined:
        library, _, number = symbol.version.rpartition("_")
        if library not in CEILINGS[platform] or not number[:1].isdigit():
            continue
        if tuple(map(int, number.split("."))) > CEILINGS[platform][library]:
            yield f"{symbol.name} needs {symbol.version}, which {platform} does not have"


def check_architectures(module: Module, expected: set[str]) -> Iterator[str]:
    for architecture in sorted(expected - module.architectures):
        yield f"has no GPU code for {architecture}"


def check_paths(module: Module) -> Iterator[str]:
    for path in sorted(set(BUILD_PATHS.findall(module.data))):
        yield f"holds the path {path.decode()} of the machine it was built on"


def check_size(wheel: Path, largest: int = LARGEST_WHEEL) -> Iterator[str]:
    if (size := wheel.stat().st_size) > largest:
        yield f"has {size / 2**20:.1f} MB, at most {largest / 2**20:.0f} are allowed"


def check_stable(folder: Path) -> Iterator[str]:
    yield from _complaints("torch-abi-audit", "--check", "torch", folder)


def check_contents(wheel: Path) -> Iterator[str]:
    yield from _complaints("check-wheel-contents", wheel)
    yield from _complaints("twine", "check", "--strict", wheel)


def _complaints(program: str, *arguments: object) -> Iterator[str]:
    command = [Path(sys.executable).parent / program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        yield f"{program}: {(done.stdout + done.stderr).strip()}"


def platform_of(wheel: Path) -> str:
    """manylinux_2_34 of fused_ops-0.1.0-cp311-cp311-manylinux_2_34_x86_64.whl."""
    tags = wheel.stem.split("-")[-1].split(".")
    return min(re.sub(r"_(x86_64|aarch64)$", "", tag) for tag in tags)


def audit(wheel: Path, platform: str | None = None) -> list[str]:
    """All that is wrong with a wheel."""
    tag = platform_of(wheel)
    problems = [*check_size(wheel), *check_contents(wheel)]
    if platform not in (None, tag):
        problems.append(f"is for {tag}, expected {platform}")
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        libraries = sorted(Path(folder).rglob("*.so*"))
        if len(libraries) != 1:
            problems.append(f"has {len(libraries)} shared libraries, expected one")
        for library in libraries:
            module = read_module(library)
            problems += check_libraries(module)
            problems += check_symbols(module)
            problems += check_versions(module, tag)
            problems += check_architectures(module, expected_architectures())
            problems += check_paths(module)
        problems += check_stable(Path(folder))
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--platform", help="the tag that the wheels must have")
    arguments = parser.parse_args()
    failed = False
    for wheel in arguments.wheels:
        problems = audit(wheel, arguments.platform)
        failed |= bool(problems)
        print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.2f} MB, ", end="")
        print("\n  ".join([f"{len(problems)} problems", *problems]) if problems else "clean")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
