"""The machine's resources as this process may use them: host memory, processor cores, and why not its GPU.

Promises: a container's limits (cgroup v1 and v2) count like the machine's own. Must not know: torch, models.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from quire_kernels.cpu.topology import by_core, by_node

# Of stops and reloads: what a supervised process leaves to its parent, since some process managers signal both.
PARENTS_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
_PR_SET_PDEATHSIG = 1


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can be allocated without swapping and without meeting a cgroup's limit.

    `root` is where /proc and /sys are looked for.
    """
    available = _meminfo_available(root)
    for folder in _cgroup_folders(root, "memory"):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        if limit is None:
            continue
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        # Inactive file pages, such as those of a model just read from disk, are reclaimed under memory pressure.
        used -= _statistic(folder / "memory.stat", ("total_inactive_file", "inactive_file"))
        available = min(available, limit - max(0, used))
    return max(0, available)


def usable_cores(root: Path = Path("/")) -> int:
    """Cores of this process' affinity mask, fewer where a cgroup's CPU quota allows fewer.

    Hardware threads of one core count once: see `quire_kernels.cpu.topology`.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(by_core(os.sched_getaffinity(0), root / "sys/devices/system/cpu"))
    else:
        cores = os.cpu_count() or 1
    for folder in _cgroup_folders(root, "cpu"):
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        words = _text(folder / "cpu.max").split()
        if len(words) == 2 and words[0] != "max":
            quota, period = int(words[0]), int(words[1])
        if quota and period and quota > 0:
            cores = min(cores, quota // period)
    return max(1, cores)


def core_shares(count: int, root: Path = Path("/")) -> list[CoreShare]:
    """Divide this process' cores into `count` shares, each of whole cores of as few memory nodes as can be.

    With more shares than cores, cores are in several. Cores that a cgroup's quota does not pay for are in none. Empty
    where the system does not tell which cores there are.
    """
    if not hasattr(os, "sched_getaffinity"):
        return []
    system = root / "sys/devices/system"
    nodes = [by_core(node, system / "cpu") for node in by_node(os.sched_getaffinity(0), system / "node")]
    left = usable_cores(root)
    paid = []
    for node in nodes:
        paid.append(node[:left])
        left -= len(paid[-1])
    return divided([node for node in paid if node], count)


def run_on(cpus: Sequence[int]) -> None:
    """Run this process on these hardware threads alone, where the system lets it: a container may forbid it."""
    with suppress(OSError):
        os.sched_setaffinity(0, cpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreShare:
    """A part of a machine's cores."""

    cpus: tuple[int, ...]  # hardware threads
    num_cores: int
    node: int  # the memory node of the first one


def divided(nodes: Sequence[Sequence[Sequence[int]]], count: int) -> list[CoreShare]:
    """The cores of all nodes in `count` shares; a core is the list of its hardware threads."""
    shares = []
    for number in range(count):
        if count <= len(nodes):
            first, last = number * len(nodes) // count, (number + 1) * len(nodes) // count
            cores = [core for node in nodes[first:last] for core in node]
        else:
            first = number * len(nodes) // count
            own = [each for each in range(count) if each * len(nodes) // count == first]
            node, place = nodes[first], own.index(number)
            if len(own) <= len(node):
                cores = list(node[place * len(node) // len(own) : (place + 1) * len(node) // len(own)])
            else:
                cores = [node[place % len(node)]]
        cpus = tuple(sorted(cpu for core in cores for cpu in core))
        shares.append(CoreShare(cpus=cpus, num_cores=len(cores), node=first))
    return shares


def gpu_driver(root: Path = Path("/")) -> str:
    """The version of the loaded NVIDIA driver; empty where there is none."""
    found = re.search(r"NVRM version:.*?\s(\d+(?:\.\d+)+)\s", _text(root / "proc/driver/nvidia/version"))
    return found[1] if found else ""


def why_no_gpu(
    cuda_version: str | None,
    error: str,
    root: Path = Path("/"),
    *,
    may_open: Callable[[Path], bool] = lambda path: os.access(path, os.R_OK | os.W_OK),
) -> str | None:
    """Why torch finds no usable GPU on this machine; None where no NVIDIA GPU is visible.

    `cuda_version`: the CUDA version that torch was built for; None: for CPUs only. `error`: torch's message at an
    attempt to use the GPU. One line, with a remedy.
    """
    driver, nodes = gpu_driver(root), sorted((root / "dev").glob("nvidia[0-9]*"))
    control = root / "dev/nvidiactl"
    if not (driver or nodes or control.exists()):
        if not _on_the_bus(root):
            return None
        return "there is an NVIDIA GPU, but no driver for it is loaded; install NVIDIA's driver"
    hidden = _environment(root).get("CUDA_VISIBLE_DEVICES", "0").strip()
    closed = " and ".join(f"/{path.relative_to(root)}" for path in (control, *nodes) if not may_open(path))
    said = " ".join(error.split())
    reasons = (
        (cuda_version is None, "torch is built for CPUs only; install a torch that is built for CUDA"),
        (hidden in ("", "-1"), f"CUDA_VISIBLE_DEVICES={hidden} hides it; unset it"),
        (
            not nodes or not control.exists(),
            "it is not in /dev; start the container with its GPUs (docker run --gpus all)",
        ),
        (closed != "", f"this user may not open {closed}; give it the rights to read and write"),
        (
            "too old" in said or "insufficient" in said,
            f"its driver {driver} is too old for torch's CUDA {cuda_version}; update the driver",
        ),
    )
    other = f"CUDA {cuda_version} cannot use it with driver {driver or 'unknown'}: {said[:300]}"
    return "there is an NVIDIA GPU, but " + next((reason for applies, reason in reasons if applies), other)


def _on_the_bus(root: Path) -> bool:
    """Whether a PCI device of NVIDIA is a display controller or a 3D controller."""
    return any(
        _text(folder / "vendor").strip() == "0x10de" and _text(folder / "class").startswith("0x03")
        for folder in (root / "sys/bus/pci/devices").glob("*")
    )


def _environment(root: Path) -> dict[str, str]:
    """The environment variables with which this process was started."""
    pairs = (entry.partition("=") for entry in _text(root / "proc/self/environ").split("\0"))
    return {name: value for name, separator, value in pairs if separator}


def _meminfo_available(root: Path) -> int:
    kibibytes = _statistic(root / "proc/meminfo", ("MemAvailable:", "MemFree:"))
    if kibibytes:
        return kibibytes * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # not Linux


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process' cgroup for a controller and of its parents, in the places of both versions.

    Inside a container the listed path may be the host's and not exist here; the mount point itself is then the
    container's.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controllers
            if not mount.is_dir():
                mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        folder = mount / path.lstrip("/")
        while folder != mount:
            yield folder
            folder = folder.parent
        yield mount


def _statistic(file: Path, names: tuple[str, ...]) -> int:
    """The value of the first of `names` in a file of `name value` lines, else 0."""
    values = {words[0]: words[1] for words in map(str.split, _text(file).splitlines()) if len(words) >= 2}
    return next((int(values[name]) for name in names if name in values), 0)


def _number(file: Path) -> int | None:
    try:
        return int(_text(file))
    except ValueError:  # absent, or "max"
        return None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def is_stopped(pid: int, root: Path = Path("/")) -> bool:
    """Whether a process is stopped by a signal or a debugger; False where the system does not tell."""
    return _fields(root / f"proc/{pid}/stat")[:1] in (["T"], ["t"])


def work_done(pid: int, root: Path = Path("/")) -> int:
    """The work of a process and its descendants so far, in hundredths of a CPU second plus MiB read from disks.

    Only for comparison with a later value: growth means progress. 0 where the system does not tell.
    """
    fields = _fields(root / f"proc/{pid}/stat")
    if len(fields) < 15:
        return 0
    ticks = sum(int(field) for field in fields[11:15])  # its own and its ended children's, in user and system mode
    done = ticks + _statistic(root / f"proc/{pid}/io", ("read_bytes:",)) // 2**20
    with suppress(OSError):  # it ended meanwhile
        for task in (root / f"proc/{pid}/task").glob("*"):
            done += sum(work_done(int(child), root) for child in _text(task / "children").split())
    return done


def num_oom_kills(root: Path = Path("/")) -> int | None:
    """Processes that the kernel has ended for lack of memory since the machine's start, those of containers included.

    None where the system does not tell.
    """
    found = re.search(r"^oom_kill (\d+)$", _text(root / "proc/vmstat"), re.MULTILINE)
    return None if found is None else int(found[1])


def _fields(stat: Path) -> list[str]:
    """The fields of a process' `stat` from its state on; the name before it may have any characters."""
    return _text(stat).rpartition(")")[2].split()


def leave_signals_to_parent() -> None:
    """Ignore the parent's signals, also one that has been pending since this process was made with them blocked."""
    for number in PARENTS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PARENTS_SIGNALS)


def die_with_parent(parent_pid: int) -> None:
    """End this process when its parent ends, however that happens; at once where it has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent ended before the call above
        sys.exit(1)
