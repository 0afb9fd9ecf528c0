# SPDX-License-Identifier: BSD-3-Clause
"""Matrices whose rows are spread over the processes of torch.distributed."""

from __future__ import annotations  # a torch without distributed has no ProcessGroup

from collections.abc import Sequence

import torch
import torch.distributed as dist


class Shards:
    """Which rows each process of a group has."""

    def __init__(
        self,
        name: str,
        rows: torch.Tensor,
        group: dist.ProcessGroup | None,
        counts: Sequence[int] | None,
    ) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if counts is None:
            own = torch.tensor(rows.shape, device=rows.device)
            shapes = [torch.empty_like(own) for _ in range(self.size)]
            dist.all_gather(shapes, own, group=group)
            counts, dims = torch.stack(shapes).T.tolist()
            if len(set(dims)) > 1:
                raise ValueError(f"{name}: expected one dim in all processes, got {dims}")
        if len(counts) != self.size or counts[self.rank] != len(rows):
            raise ValueError(
                f"counts: expected one for each of {self.size} processes and this one's "
                f"{len(rows)} at {self.rank}, got {list(counts)}"
            )
        self.counts = counts
        self.first = sum(counts[: self.rank])

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """All rows, in the order of ranks."""
        padded, work = self.start_gather(own)
        work.wait()
        return self.join(padded)

    def start_gather(self, own: torch.Tensor) -> tuple[list[torch.Tensor], dist.Work]:
        """Starts a gathering of shards, padded to the same length, and returns the work to wait
        for before they are joined."""
        most = max(self.counts)
        if len(own) < most:
            own = torch.cat([own, own.new_zeros((most - len(own), own.shape[1]))])
        padded = [own.new_empty(own.shape) for _ in self.counts]
        return padded, dist.all_gather(padded, own.contiguous(), group=self.group, async_op=True)

    def join(self, padded: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([shard[:n] for shard, n in zip(padded, self.counts, strict=True)])
