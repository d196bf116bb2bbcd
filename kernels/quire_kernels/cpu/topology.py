"""Groups the hardware threads of this machine by core and by memory node.

Two threads of a core share its multiply-add units, its tile unit and its caches: a second worker there adds next to
nothing and slows the first one down. Promises: where the system does not tell, every thread counts as a core.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path

_SYSTEM = Path("/sys/devices/system/cpu")
_NODES = Path("/sys/devices/system/node")
_LISTS = ("core_cpus_list", "thread_siblings_list")  # the second is the name before Linux 5.2


def by_core(cpus: Iterable[int], root: Path = _SYSTEM) -> list[list[int]]:
    """`cpus` in order, grouped by core; `root`: the system's description of them."""
    left = set(cpus)
    cores = []
    for cpu in sorted(left):
        if cpu in left:
            core = sorted(left & {cpu, *_siblings(cpu, root)})
            left.difference_update(core)
            cores.append(core)
    return cores


def spread(cpus: Iterable[int], root: Path = _SYSTEM) -> list[int]:
    """`cpus` in the order for workers: the first thread of every core, then the second ones."""
    rounds = zip_longest(*by_core(cpus, root))
    return [cpu for each in rounds for cpu in each if cpu is not None]


def by_node(cpus: Iterable[int], root: Path = _NODES) -> list[list[int]]:
    """`cpus` in order, grouped by memory node; one group where the system does not tell. `root`: its description."""
    left = set(cpus)
    nodes = []
    for folder in sorted(root.glob("node[0-9]*"), key=lambda folder: int(folder.name.removeprefix("node"))):
        with suppress(OSError, ValueError):
            own = left & _numbers((folder / "cpulist").read_text())
            left -= own
            nodes.append(sorted(own))
    return [node for node in (*nodes, sorted(left)) if node]


def _siblings(cpu: int, root: Path) -> set[int]:
    for name in _LISTS:
        try:
            return _numbers((root / f"cpu{cpu}" / "topology" / name).read_text())
        except (OSError, ValueError):
            continue
    return set()


def _numbers(text: str) -> set[int]:
    """The numbers in the system's list format, such as 0-1,8-9. Raises ValueError."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers
