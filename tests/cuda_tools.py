# SPDX-License-Identifier: BSD-3-Clause
"""CUDA graphs and kernels, as the tests of every op look at them."""

import torch


def capture(step):
    """A CUDA graph of `step`, captured on a side stream that has run it before, and its results."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = step()
    return graph, results


def kernels_of(function):
    """The names of what runs on the device meanwhile, copies included, in order."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    on_device = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [event.name for event in on_device if "Sync" not in event.name]
