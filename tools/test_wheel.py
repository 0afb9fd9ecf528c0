# SPDX-License-Identifier: BSD-3-Clause
"""Tests wheels in fresh environments, where neither the sources nor a compiler's output are.

    python tools/test_wheel.py dist/*.whl                      with the newest torch that pip finds
    python tools/test_wheel.py --torch 2.10.0 --torch 2.15.0 dist/*.whl

Each wheel is tested on the Python it is for, wherever that is found: on PATH or among pyenv's. For
each version of torch: import, its time, env_info, and the tests, which skip what needs a GPU where
there is none. Prints a table and exits with 1 if anything failed or no Python was found.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMPORT_BUDGET_MS = 60

# Prints the milliseconds that `import fused_ops` adds to `import torch`.
IMPORT_TIME = """
import time, torch
start = time.perf_counter()
import fused_ops
print((time.perf_counter() - start) * 1e3)
assert not torch.cuda.is_initialized(), "the import created a CUDA context"
"""


class Failed(Exception):
    pass


def find_python(wheel: Path) -> str:
    """The interpreter for cp311 of fused_ops-0.1.0-cp311-cp311-linux_x86_64.whl."""
    minor = re.search(r"-cp3(\d+)-", wheel.name)[1]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [path / "bin" / "python" for path in sorted(pyenv.glob(f"3.{minor}.*"))]
    if python := shutil.which(f"python3.{minor}", path=os.environ["PATH"]):
        found.append(Path(python))
    for python in reversed(found):  # pyenv's shims are on PATH without the Python behind them
        if subprocess.run([python, "-c", "import venv"], capture_output=True).returncode == 0:
            return str(python)
    raise Failed(f"no Python 3.{minor} found")


def run(command: list, what: str, **options) -> str:
    done = subprocess.run(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        **options,
    )  # fmt: skip
    if done.returncode != 0:
        raise Failed(f"{what} failed:\n{done.stdout[-4000:]}")
    return done.stdout


def test(wheel: Path, torch: str, folder: Path) -> str:
    """Tests a wheel with a version of torch, and tells what was seen."""
    run([find_python(wheel), "-m", "venv", folder / "venv"], "the environment")
    python = folder / "venv" / "bin" / "python"
    install = [python, "-m", "pip", "install", "-q"]
    # One step: a wheel whose requirements do not fit that torch must not pass.
    run([*install, f"torch{torch and '=='}{torch}", f"{wheel.resolve()}[test]"], "pip install")
    sources = shutil.ignore_patterns("release", "__pycache__")  # what tests the tools here
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=sources)
    shutil.copytree(ROOT / "examples", folder / "examples")
    environment = {**os.environ, "FUSED_OPS_REQUIRE_NATIVE": "1", "OMP_WAIT_POLICY": "passive"}
    here = {"cwd": folder, "env": environment}
    version = run([python, "-c", "import torch; print(torch.__version__)"], "torch", **here).strip()
    times = [float(run([python, "-c", IMPORT_TIME], "import", **here)) for _ in range(5)]
    if min(times) > IMPORT_BUDGET_MS:
        raise Failed(f"import took {min(times):.0f} ms, at most {IMPORT_BUDGET_MS} are allowed")
    run([python, "-m", "fused_ops.env_info"], "env_info", **here)
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    summary = run(command, "the tests", **here).strip().splitlines()[-1]
    return f"torch {version}, import {min(times):.0f} ms, {summary}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--torch", action="append", help="a version of torch; may be repeated")
    arguments = parser.parse_args()
    failed = False
    for wheel in arguments.wheels:
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        print(f"{wheel.name}, {wheel.stat().st_size / 2**20:.2f} MB, sha256 {digest}", flush=True)
        for torch in arguments.torch or [""]:
            start = time.monotonic()
            try:
                with tempfile.TemporaryDirectory() as folder:
                    result = test(wheel, torch, Path(folder))
            except Failed as error:
                failed = True
                result = f"torch {torch or 'newest'}: FAILED: {error}"
            print(f"  {result} ({time.monotonic() - start:.0f} s)", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
