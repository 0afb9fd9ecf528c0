# SPDX-License-Identifier: BSD-3-Clause
"""What a step of SVGD would take on many GPUs, from what one and two took."""

from dataclasses import dataclass

RANKS = (8, 16, 64, 256, 1024)
COUNTS = (131072, 1048576)
DIM = 64
HOST_GPUS = 8  # that NVLink joins
# Assumed, not measured: bytes a second that a GPU receives, and seconds until a small message is
# added up over all ranks and known to them: a base, and as much for each doubling of the ranks.
NVLINK, NETWORK = 300e9, 40e9
LATENCY_BASE, LATENCY_DOUBLING = 15e-6, 4e-6
MESSAGES = 8  # that the median adds up
HOP = 10e-6  # of a ring, from one rank to the next


@dataclass
class Measured:
    """Of `count` particles on one GPU and on two, in seconds."""

    count: int
    one: float
    two: float

    @property
    def pair(self) -> float:
        """For each of the N * N pairs."""
        return self.one / self.count**2

    @property
    def replicated(self) -> float:
        """For each particle, what every process does alike: the sample, the split in halves."""
        return max(0.0, self.two - self.one / 2) / self.count


def latency(ranks: int) -> float:
    return LATENCY_BASE + LATENCY_DOUBLING * (ranks - 1).bit_length()


def link(ranks: int) -> float:
    return NVLINK if ranks <= HOST_GPUS else NETWORK


def gather_seconds(measured: Measured, count: int, ranks: int) -> float:
    """As built: all gather all, then each computes its share."""
    received = 8 * count * DIM * (ranks - 1) / ranks
    computing = measured.pair * count**2 / ranks + measured.replicated * count
    return computing + received / link(ranks) + (2 + MESSAGES) * latency(ranks)


def ring_seconds(measured: Measured, count: int, ranks: int) -> float:
    """Shards pass from rank to rank twice, once for the median and once for phi, while those that
    are there are worked on; nothing is replicated."""
    moving = 12 * count * DIM / link(ranks) + 2 * (ranks - 1) * HOP
    computing = measured.pair * count**2 / ranks + measured.replicated * count / ranks
    return max(computing, moving) + MESSAGES * latency(ranks)


def page(sizes: list[Measured], gpu: str) -> list[str]:
    """docs/distributed.md."""
    measured = max(sizes, key=lambda size: size.count)
    lines = [
        "# SVGD on several GPUs and machines",
        "",
        "Written by `python -m benchmarks.report`. `fused_ops.distributed` shards the particles",
        "over the processes of a group of torch.distributed. A step",
        "",
        "1. gathers all particles, and starts to gather all scores: 8 * N * dim bytes in float32,",
        "   which every process holds until the step is done;",
        "2. finds the median: all draw the same sample and from it the same bracket, each counts",
        "   its share of the pairs i < j, and messages of 16 KB are added up, each of which tells",
        "   all what to look for next. The median is exact, and the same bits everywhere;",
        "3. forms phi of the process's own particles, as one process with all of them would.",
        "",
        "Results do not depend on the number of processes but by the rounding of float32 sums.",
        "",
        f"## Measured, {gpu}, NVLink",
        "",
        "`torchrun --nproc-per-node 2 -m benchmarks.svgd.distributed`; the time of the slowest",
        "process, float32.",
        "",
        "| N x dim | one GPU, ms | two, ms | ratio |",
        "|---|---:|---:|---:|",
    ]
    for size in sizes:
        lines.append(
            f"| {size.count} x {DIM} | {1e3 * size.one:.2f} | {1e3 * size.two:.2f} "
            f"| {size.one / size.two:.2f} |"
        )
    lines += [
        "",
        "## Modelled: many machines",
        "",
        f"No machine was there for this; it is arithmetic from the last row: {measured.pair:.2e} s",
        f"for each of the N * N pairs, shared evenly, and {measured.replicated:.1e} s for each",
        "particle that every process spends alike. Assumed are",
        f"{NVLINK / 1e9:.0f} GB/s into each GPU up to {HOST_GPUS} of them and",
        f"{NETWORK / 1e9:.0f} GB/s beyond, {1e6 * LATENCY_BASE:.0f} us and "
        f"{1e6 * LATENCY_DOUBLING:.0f} us more for each doubling of the ranks",
        f"for a small sum over all, and {1e6 * HOP:.0f} us for a hop of a ring.",
        "",
        "`gather` is what is built. `ring` would pass shards from rank to rank twice, once for the",
        "median and once for phi, and work on them meanwhile: N / ranks particles in memory, and",
        "communication hidden behind the computation as long as that takes longer.",
        "",
        "| N x dim | ranks | received, each | gather, ms | of one GPU | ring, ms | memory, gather "
        "| ring |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for count in COUNTS:
        one = measured.pair * count**2
        for ranks in RANKS:
            gather = gather_seconds(measured, count, ranks)
            held = 8 * count * DIM / 1e6
            lines.append(
                f"| {count} x {DIM} | {ranks} | {held * (ranks - 1) / ranks:.0f} MB "
                f"| {1e3 * gather:.2f} | 1 / {one / gather:.0f} "
                f"| {1e3 * ring_seconds(measured, count, ranks):.2f} | {held:.0f} MB "
                f"| {3 * held / ranks:.1f} MB |"
            )
    lines += [
        "",
        "So gathering is right as long as a share of the pairs takes longer than receiving all",
        "particles, N / ranks above some thousands; beyond that, and where one GPU cannot hold all",
        "particles, a ring is worth building. What every process does alike limits both before the",
        "network does: sharing the sample and the split would come first.",
    ]
    return lines
