"""Hardware threads that are one core, read from trees such as the system's."""

import os
from pathlib import Path

import pytest

from quire_engine.machine import core_shares, divided, usable_cores
from quire_kernels.cpu.topology import by_core, by_node, spread


def tree(root: Path, siblings: dict[int, str], name: str = "core_cpus_list") -> Path:
    for cpu, written in siblings.items():
        folder = root / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / name).write_text(written + "\n")
    return root


@pytest.mark.parametrize("name", ["core_cpus_list", "thread_siblings_list"])
def test_threads_of_a_core_are_found_in_both_ways_of_numbering_them(tmp_path, name):
    beside = tree(tmp_path / "beside", {cpu: f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}" for cpu in range(6)}, name)
    assert by_core(range(6), beside) == [[0, 1], [2, 3], [4, 5]]
    apart = tree(tmp_path / "apart", {cpu: f"{cpu % 3},{cpu % 3 + 3}" for cpu in range(6)}, name)
    assert by_core(range(6), apart) == [[0, 3], [1, 4], [2, 5]]
    assert (spread(range(6), beside), spread(range(6), apart)) == ([0, 2, 4, 1, 3, 5], [0, 1, 2, 3, 4, 5])


def test_only_threads_that_may_be_used_count(tmp_path):
    """An affinity mask or a cpuset that cuts through cores; a sibling outside it is nobody's."""
    machine = tree(tmp_path, {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)})
    assert by_core({1, 2, 6, 7}, machine) == [[1], [2, 6], [7]]
    assert spread({1, 2, 6, 7}, machine) == [1, 2, 7, 6]


@pytest.mark.parametrize("written", ["", "0-x", "none", "0-1,,"])
def test_what_cannot_be_read_is_a_core_of_its_own(tmp_path, written):
    assert by_core(range(3), tree(tmp_path, dict.fromkeys(range(3), written))) == [[0], [1], [2]]
    assert by_core({5, 3}, tmp_path / "nothing") == [[3], [5]]
    assert by_core(()) == []


def test_the_older_list_serves_where_the_newer_one_cannot_be_read(tmp_path):
    tree(tmp_path, {0: "", 1: ""})
    for cpu in (0, 1):
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text("0-1\n")
    assert by_core((0, 1), tmp_path) == [[0, 1]]


def test_cores_are_counted_and_not_their_threads(tmp_path):
    cpus = sorted(os.sched_getaffinity(0))
    assert usable_cores(tmp_path) == len(cpus)
    tree(tmp_path / "sys/devices/system/cpu", dict.fromkeys(cpus, ",".join(map(str, cpus))))
    assert usable_cores(tmp_path) == 1


def nodes(root: Path, lists: dict[int, str]) -> Path:
    for node, written in lists.items():
        (root / f"node{node}").mkdir(parents=True)
        (root / f"node{node}" / "cpulist").write_text(written + "\n")
    return root


def test_cores_are_grouped_by_memory_node(tmp_path):
    machine = nodes(tmp_path, {0: "0-3,8-11", 1: "4-7", 10: "12-13"})
    assert by_node(range(14), machine) == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7], [12, 13]]
    assert by_node({2, 5, 99}, machine) == [[2], [5], [99]], "who is in no node is in one of his own"
    assert by_node({3, 1}, tmp_path / "nothing") == [[1, 3]]


@pytest.mark.parametrize(
    ("machine", "count", "expected"),
    [
        ([[[0], [1]]], 2, [(0,), (1,)]),
        ([[[0], [1], [2]]], 2, [(0,), (1, 2)]),
        ([[[0, 8], [1, 9], [2]], [[4], [5], [6]]], 4, [(0, 8), (1, 2, 9), (4,), (5, 6)]),
        ([[[0]], [[1]], [[2]], [[3]]], 2, [(0, 1), (2, 3)]),
        ([[[0], [1]], [[2], [3]]], 1, [(0, 1, 2, 3)]),
        ([[[0], [1]]], 4, [(0,), (1,), (0,), (1,)]),
        ([[[0], [1]], [[2], [3]]], 3, [(0,), (1,), (2, 3)]),
    ],
)
def test_shares_are_of_whole_cores_and_few_nodes(machine, count, expected):
    assert [share.cpus for share in divided(machine, count)] == expected


def test_shares_of_this_machine_are_its_cores():
    shares = core_shares(1)
    if hasattr(os, "sched_getaffinity"):
        assert set(shares[0].cpus) <= os.sched_getaffinity(0)
        assert shares[0].num_cores == usable_cores()
