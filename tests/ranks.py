# SPDX-License-Identifier: BSD-3-Clause
"""Checks that run on several processes of torch.distributed at once."""

import gc
import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def _run(rank, ranks, backend, folder, checks):
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store = dist.FileStore(str(folder / "store"), ranks)
    minute = timedelta(minutes=1)  # for a rank that waits where another failed
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=minute)
    for check in checks:
        try:
            check()
        except Exception:
            (folder / f"{check.__name__}.{rank}").write_text(traceback.format_exc())
    # A sharded model is a cycle that holds the group, whose threads abort a process at its end.
    gc.collect()
    dist.destroy_process_group()


def failures_on_ranks(checks, ranks, folder, backend="gloo"):
    """Runs functions without arguments on `ranks` processes, started once for all.

    Returns what went wrong, by the function's name and the rank: "check_this.1".
    """
    torch.multiprocessing.spawn(_run, (ranks, backend, folder, checks), nprocs=ranks)
    return {file.name: file.read_text() for file in folder.glob("check_*")}


def place():
    """Where the tensors of this process belong."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def own(tensor, counts):
    """This process's rows."""
    first = sum(counts[: dist.get_rank()])
    return tensor[first : first + counts[dist.get_rank()]]


def assert_passed(failures, check):
    found = [text for name, text in failures.items() if name.startswith(f"{check.__name__}.")]
    assert not found, "\n".join(found)
