# SPDX-License-Identifier: BSD-3-Clause
"""What the tests of every op share."""

import os
import shutil

import pytest
import torch


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: needs a CUDA device")
    config.addinivalue_line("markers", "timing: compares times; wants the machine to itself")
    config.addinivalue_line("markers", "slow: takes a minute or more; only -m slow runs it")
    # Without the native module most tests would compare PyTorch with itself.
    os.environ["FUSED_OPS_REQUIRE_NATIVE"] = "1"
    # Thousands of small calls, which several threads slow down, the more so on a busy machine.
    # test_repeatability.py compares numbers of threads.
    torch.set_num_threads(1)


def pytest_runtest_setup(item):
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if item.get_closest_marker("slow") and "slow" not in item.config.option.markexpr:
        pytest.skip("slow")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    return request.param


@pytest.fixture
def fused_only():
    """Makes a fallback an error, so that no test compares PyTorch with itself unnoticed."""
    import fused_ops

    with fused_ops.set_fallback("error"):
        yield


@pytest.fixture
def poisoned_memory():
    """Hands out new memory filled with NaN, so that an element never written shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty_strided((3,), (1,)).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def inductor_cache(tmp_path_factory):
    """A folder of this session for what inductor compiles and finds out about the compiler."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    from torch._inductor.utils import fresh_cache

    with fresh_cache(dir=tmp_path_factory.mktemp("inductor")):
        yield


@pytest.fixture
def two_threads():
    torch.set_num_threads(2)
    assert torch.get_num_threads() == 2
    yield
    torch.set_num_threads(1)
