# SPDX-License-Identifier: BSD-3-Clause
"""Threads, streams, devices and processes that call at the same time."""

import contextlib
import sys
import threading
from functools import partial

import pytest
import torch
from comparison import assert_same_bits
from cuda_tools import capture
from every_op import make_inputs, run_every_op
from torch.utils.data import DataLoader, Dataset

import fused_ops

pytestmark = pytest.mark.usefixtures("fused_only")


def assert_all_same(results, expected):
    for result, other in zip(results, expected, strict=True):
        assert_same_bits(result, other)


def run_in_threads(*functions):
    """Runs them all at once, and raises what one of them raised."""
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=[function]) for function in functions]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # or most calls would be over before another thread's turn
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    if errors:
        raise errors[0]


def own_stream(device):
    if torch.device(device).type == "cpu":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))


def test_eight_threads_on_shared_inputs(device):
    """On CUDA each has a stream, and so memory, of its own."""
    inputs = make_inputs(device)
    expected = run_every_op(inputs)
    if device == "cuda":
        torch.cuda.synchronize()

    def work():
        with own_stream(device):
            for _ in range(10):
                assert_all_same(run_every_op(inputs), expected)

    run_in_threads(*8 * [work])
    assert_all_same(run_every_op(inputs), expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.cuda
def test_two_devices_at_once():
    expected = [x.cpu() for x in run_every_op(make_inputs("cuda:0"))]

    def work(device):
        inputs = make_inputs(device)
        for _ in range(20):
            found = run_every_op(inputs)
            assert all(x.device == torch.device(device) for x in found)
            assert_all_same([x.cpu() for x in found], expected)

    run_in_threads(lambda: work("cuda:0"), lambda: work("cuda:1"))


@pytest.mark.cuda
def test_calls_while_another_stream_captures():
    inputs = make_inputs("cuda")
    # A matrix product's first call on a stream gets memory, which ends the other one's capture.
    run = partial(run_every_op, products=False)
    expected = run(inputs)
    capture(lambda: run(inputs))  # compiles and allocates what the first calls do
    torch.cuda.synchronize()
    captured, done = [], threading.Event()

    def capture_again():
        graph = torch.cuda.CUDAGraph()
        try:
            for _ in range(5):
                graph.reset()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    captured[:] = run(inputs)
        finally:
            done.set()
        graph.replay()
        torch.cuda.synchronize()
        assert_all_same(captured, expected)

    def call():
        with own_stream("cuda"):
            while not done.is_set():
                found = run(inputs)
        torch.cuda.synchronize()
        assert_all_same(found, expected)

    run_in_threads(capture_again, call)


class Calls(Dataset):
    """Each item is what the ops make of it, in the worker's process."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        fused_ops.set_fallback("error")
        inputs = [[x + index for x in matrices] for matrices in make_inputs("cpu")]
        return [x.detach() for x in run_every_op(inputs)]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="fork")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_data_loader(method):
    """Also after this process has used several threads, which a fork does not take along."""
    torch.set_num_threads(2)
    expected = [Calls()[index] for index in range(len(Calls()))]
    torch.set_num_threads(1)
    loader = DataLoader(
        Calls(), batch_size=None, num_workers=2, multiprocessing_context=method, timeout=60
    )
    for found, other in zip(loader, expected, strict=True):
        assert_all_same(found, other)
