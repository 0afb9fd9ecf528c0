# SPDX-License-Identifier: BSD-3-Clause
"""Particles sharded over GPUs, against all of them on one:

    torchrun --nproc-per-node 2 -m benchmarks.svgd.distributed

The rows have the variant gpus=2, in which "one_gpu" is `fused_ops.svgd_phi` on the first GPU.
"""

import os

import torch
import torch.distributed as dist

import fused_ops
from benchmarks import measure, rows
from benchmarks.case import errors
from benchmarks.svgd.cases import SvgdCase

SHAPES = [(32768, 64), (65536, 64), (131072, 64), (262144, 64)]
RUNS = 11


def timed(call) -> dict:
    """The fields of a row; all processes call it. The time is that of the slowest."""
    for _ in range(3):
        call()
    times = []
    for _ in range(RUNS):
        dist.barrier()
        (own,) = measure.device_times(call, 1)
        slowest = torch.tensor(own, device="cuda")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.append(slowest.item())
    dist.barrier()
    wall = measure.wall_time(call, RUNS)
    return measure.summary(times) | {"wall_us": wall, "peak_bytes": measure.peak_bytes(call)}


def measure_shape(count: int, dim: int) -> None:
    rank, gpus = dist.get_rank(), dist.get_world_size()
    case = SvgdCase("phi", count, dim, torch.float32, "cuda", 0.0)
    case.make_inputs()  # the same everywhere
    counts = [count // gpus + (other < count % gpus) for other in range(gpus)]
    first = sum(counts[:rank])
    own = [x[first : first + counts[rank]] for x in (case.particles, case.score)]

    def sharded() -> torch.Tensor:
        return fused_ops.distributed.svgd_phi(*own, counts=counts)

    def whole() -> torch.Tensor:
        return fused_ops.svgd_phi(case.particles, case.score)

    found = torch.cat(gathered(sharded(), counts))
    results = {
        "fused": (found, timed(sharded)),
        "one_gpu": (whole(), timed(whole)),
    }
    if rank > 0:
        return
    exact = case.exact()
    measured = [
        {
            "op": "svgd", "case": "phi", "variant": f"gpus={gpus}", "shape": [count, dim],
            "dtype": "float32", "impl": name,
        }
        | errors([phi[case.rows]], exact)
        | fields
        | rows.environment("cuda")
        for name, (phi, fields) in results.items()
    ]  # fmt: skip
    rows.write(measured)
    print(rows.panel(f"svgd phi on {gpus} GPUs ({count}, {dim})", measured), flush=True)


def gathered(own: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
    shards = [own.new_empty((n, own.shape[1])) for n in counts]
    dist.all_gather(shards, own)
    return shards


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    fused_ops.set_fallback("error")
    for shape in SHAPES:
        measure_shape(*shape)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
