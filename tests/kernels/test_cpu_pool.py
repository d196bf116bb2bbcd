"""The worker threads as the system sees them; what they compute is tested everywhere else, their races in C++."""

import os
import threading
import time

import pytest

from quire_kernels.cpu.ops import cpu_kernel_set


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
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and {os.sched_getscheduler(worker) for worker in workers} != {os.SCHED_BATCH}:
        time.sleep(0.01)
    assert {os.sched_getscheduler(worker) for worker in workers} == {os.SCHED_BATCH}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER, "the caller goes on without them"
