# SPDX-License-Identifier: BSD-3-Clause
"""What is installed, what runs where, and whether it computes what PyTorch does.

    python -m fused_ops.env_info [--json]

Exits with 1 where the native module is missing or broken, or its self-test fails.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from functools import partial

import torch

import fused_ops
from fused_ops._library import native, why_not
from fused_ops._support import name_of
from fused_ops.batch_triplet.ops import MINING, loss_in_torch
from fused_ops.svgd import reference as svgd_reference
from fused_ops.triplet import indexed

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _triplet_arguments(dtype: torch.dtype, device: str) -> tuple:
    return tuple(torch.ones(2, 8, dtype=dtype, device=device) for _ in range(3))


def _svgd_arguments(dtype: torch.dtype, device: str) -> tuple:
    return tuple(torch.ones(2, 8, dtype=dtype, device=device) for _ in range(2))


def _triplet_indexed_arguments(dtype: torch.dtype, device: str) -> tuple:
    index = torch.arange(2, device=device)
    return torch.ones(2, 8, dtype=dtype, device=device), index, index, index


def _batch_triplet_arguments(dtype: torch.dtype, device: str) -> tuple:
    return torch.ones(2, 8, dtype=dtype, device=device), torch.arange(2, device=device)


OPS = {
    fused_ops.triplet_margin_loss: (_triplet_arguments, "p 1, 2, inf; any dim"),
    fused_ops.triplet_margin_loss_indexed: (_triplet_indexed_arguments, "p 1, 2, inf; any dim"),
    fused_ops.batch_triplet_loss: (_batch_triplet_arguments, "any number of rows and dim"),
    fused_ops.svgd_phi: (_svgd_arguments, "any N and dim; without gradients"),
}


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.split("\n")[0] or None
    except OSError:
        return None


def _gpus() -> list[dict]:
    if not torch.cuda.is_available():
        return []
    return [
        {
            "name": torch.cuda.get_device_name(index),
            "capability": "{}.{}".format(*torch.cuda.get_device_capability(index)),
        }
        for index in range(torch.cuda.device_count())
    ]


def _paths(device: str) -> dict[str, dict[str, str]]:
    """For each op and dtype: fused, or why not."""
    table = {}
    for function, (arguments, limits) in OPS.items():
        row = {"limits": limits}
        for dtype in DTYPES:
            dispatch = fused_ops.explain(function, *arguments(dtype, device))
            row[name_of(dtype)] = "; ".join([dispatch.path, *dispatch.reasons])
        table[function.__name__] = row
    return table


def _compare(function, reference, inputs, **gradient_tolerances) -> None:
    """Two losses of the inputs, and their gradients."""
    ours, theirs = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    loss, expected = function(*ours), reference(*theirs)
    for x in (loss, expected):
        x.backward()
    torch.testing.assert_close(loss, expected)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad, **gradient_tolerances)


def _check_triplet(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(40, 24, generator=generator).to(device) for _ in range(3)]
    _compare(
        partial(fused_ops.triplet_margin_loss, swap=True),
        partial(torch.nn.functional.triplet_margin_loss, swap=True),
        inputs,
    )


def _check_triplet_indexed(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(40, 24, generator=generator).to(device)
    indices = torch.randint(40, (3, 90), generator=generator).to(device)
    _compare(
        lambda x: fused_ops.triplet_margin_loss_indexed(x, *indices),
        lambda x: indexed.reference(x, *indices),
        [embeddings],
    )


def _check_batch_triplet(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(60, 5, generator=generator).to(device)
    labels = torch.arange(60, device=device) % 7

    def reference(x, mining):
        settings = 0, 0.2, mining, "euclidean", "mean", False
        return loss_in_torch(x, None, labels, None, settings)[0]

    for mining in MINING:
        _compare(
            partial(fused_ops.batch_triplet_loss, labels=labels, mining=mining),
            partial(reference, mining=mining),
            [embeddings],
            rtol=1e-4,
            atol=1e-5,
        )


def _check_svgd(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    particles = torch.randn(60, 5, generator=generator).to(device)
    phi = fused_ops.svgd_phi(particles, -particles)
    bandwidth = svgd_reference.bandwidth(particles, "median")
    expected = svgd_reference.phi(particles, -particles, bandwidth, "rbf", 1.0)
    torch.testing.assert_close(phi, expected, rtol=1e-4, atol=1e-5)


CHECKS = {
    "triplet_margin_loss": _check_triplet,
    "triplet_margin_loss_indexed": _check_triplet_indexed,
    "batch_triplet_loss": _check_batch_triplet,
    "svgd_phi": _check_svgd,
}


def _self_test(device: str) -> dict[str, str]:
    """For each op: passed, or how it failed."""
    results = {}
    for name, check in CHECKS.items():
        try:
            check(device)
            results[name] = "passed"
        except Exception as error:  # whatever it is, it belongs into the report
            results[name] = f"FAILED: {type(error).__name__}: {error}".split("\n")[0]
    return results


def collect() -> dict:
    """All facts, as data."""
    build = native.build_info() if native else None
    disabled = os.environ.get("FUSED_OPS_DISABLE_NATIVE") == "1"
    gpus = _gpus()
    devices = ["cpu", "cuda"] if gpus else ["cpu"]
    tests = {device: _self_test(device) for device in devices}
    failed = any(result != "passed" for test in tests.values() for result in test.values())
    return {
        "fused_ops": fused_ops.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "driver": _driver(),
        "gpus": gpus,
        "native_loaded": native is not None,
        "native_problem": why_not or None,
        "build": build,
        "paths": {device: _paths(device) for device in devices},
        "self_test": tests,
        "broken": failed or (native is None and not disabled),
    }


def _lines(facts: dict):
    for name in ("fused_ops", "python", "platform", "libc", "torch"):
        yield f"{name:14} {facts[name]}"
    yield f"{'torch CUDA':14} {facts['torch_cuda'] or 'none (CPU build)'}"
    yield f"{'driver':14} {facts['driver'] or 'none found'}"
    for gpu in facts["gpus"] or [{"name": "none", "capability": "-"}]:
        yield f"{'GPU':14} {gpu['name']}, compute capability {gpu['capability']}"
    if facts["native_loaded"]:
        build = facts["build"]
        kernels = (
            f"CUDA {build['cuda']} for {build['architectures']}"
            if build["cuda"]
            else "none for CUDA (no nvcc was found when it was built)"
        )
        yield f"{'native module':14} loaded; torch {build['torch_target']}+, {build['compiler']}"
        yield f"{'kernels':14} CPU; {kernels}"
    else:
        yield f"{'native module':14} not loaded: {facts['native_problem']}"
    for device, table in facts["paths"].items():
        for op, row in table.items():
            yield f"\n{op} on {device} ({row['limits']})"
            yield f"  {'self-test':12} {facts['self_test'][device][op]}"
            for dtype in map(name_of, DTYPES):
                yield f"  {dtype:12} {row[dtype]}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fused_ops.env_info", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    facts = collect()
    print(json.dumps(facts, indent=2) if arguments.json else "\n".join(_lines(facts)))
    return int(facts["broken"])


if __name__ == "__main__":
    sys.exit(main())
