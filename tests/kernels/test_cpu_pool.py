"""The worker threads as the system sees them; what they compute is tested everywhere else, their races in C++."""

import os
import threading
import time

import pytest
import torch

from quire_kernels.cpu.ops import cpu_kernel_set
from quire_kernels.kernel_set import KernelSet, Norm


def may_choose_a_policy() -> bool:
    refused: list[OSError] = []

    def choose() -> None:
        try:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        except OSError as error:
            refused.append(error)

    thread = threading.Thread(target=choose)
    thread.start()
    thread.join()
    return not refused


@pytest.mark.skipif(not may_choose_a_policy(), reason="this container refuses sched_setscheduler")
def test_workers_do_not_take_the_core_from_woken_threads():
    before = set(os.listdir("/proc/self/task"))
    kernels = cpu_kernel_set(3)
    workers = [int(task) for task in set(os.listdir("/proc/self/task")) - before]
    assert len(workers) >= 2, kernels
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and {os.sched_getscheduler(worker) for worker in workers} != {os.SCHED_BATCH}:
        time.sleep(0.01)
    assert {os.sched_getscheduler(worker) for worker in workers} == {os.SCHED_BATCH}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER, "the caller goes on without them"


def workers_of(threads: int) -> tuple[KernelSet, list[int]]:
    before = set(os.listdir("/proc/self/task"))
    kernels = cpu_kernel_set(threads)
    return kernels, [int(task) for task in set(os.listdir("/proc/self/task")) - before]


def run_something(kernels: KernelSet) -> None:
    x, norm = torch.ones(70, 64).bfloat16(), torch.ones(64).bfloat16()
    kernels.logits(x, Norm(norm, 1e-6), kernels.pack_linear(torch.ones(64, 64).bfloat16(), None))


def test_workers_keep_off_the_callers_core_and_the_caller_may_go_on_anywhere():
    all_cores = os.sched_getaffinity(0)
    kernels, workers = workers_of(2)
    if len(all_cores) < 2:
        pytest.skip("one core")
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        run_something(kernels)
        if all(len(os.sched_getaffinity(worker)) == len(all_cores) - 1 for worker in workers):
            break
    assert [len(os.sched_getaffinity(worker)) for worker in workers] == [len(all_cores) - 1]
    assert os.sched_getaffinity(0) == all_cores


def test_more_workers_than_cores_may_run_on_all():
    all_cores = os.sched_getaffinity(0)
    kernels, workers = workers_of(len(all_cores) + 1)
    for _ in range(20):
        run_something(kernels)
    assert [os.sched_getaffinity(worker) for worker in workers] == [all_cores] * len(all_cores)
