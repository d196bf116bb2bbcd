"""Stores the measured rates of this CPU in a file beside the compiled kernels.

Promises: a CPU is measured once, by one of the processes that start together; a file that is damaged, of another CPU,
or writable by others is measured anew. If no file can be written, every start measures.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from quire_kernels.cpu import library
from quire_kernels.cpu.rates import CoreRates
from quire_kernels.trusted_folder import UntrustedFolder, open_trusted, trusted

_log = logging.getLogger(__name__)
_CPUINFO = Path("/proc/cpuinfo")
# CPUs with equal values here have equal rates. The clock is left out, since it changes all the time.
_IDENTITY = ("vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "flags")
_VERSION = 1  # version of the file and of the measurement
_MOST_BYTES = 1 << 16


def recalled(cache_dir: Path | None = None) -> CoreRates | None:
    """The stored rates of this CPU; None if there are none, or the file cannot be trusted."""
    of = identity()
    with suppress(OSError):
        return _read((cache_dir or library.default_cache()) / _name(of), of)
    return None


def remembered(measure: Callable[[], CoreRates], cache_dir: Path | None = None) -> CoreRates:
    """The stored rates, or those that `measure` returns, stored in `cache_dir` (default: the folder of the kernels)."""
    of = identity()
    rates: CoreRates | None = None
    try:
        path = trusted(cache_dir or library.default_cache()) / _name(of)
        with library.locked(path.with_suffix(".lock")):
            try:
                rates = _read(path, of)  # another process may have measured meanwhile
            except UntrustedFolder as error:
                _log.warning("%s; it is not believed but measured anew", error)
            if rates is None:
                rates = measure()
                _write(path, of, rates)
    except OSError as error:
        _log.info("what this CPU can do is measured at every start: %s", error)
    return measure() if rates is None else rates


def identity() -> str:
    """The key of the rates: the CPU, by its first processor, and the compiler flags."""
    try:
        text = _CPUINFO.read_text(encoding="ascii", errors="replace")
    except OSError:
        text = ""
    lines = text.strip().split("\n\n", 1)[0].splitlines()
    told = [" ".join(line.split()) for line in lines if line.partition(":")[0].strip() in _IDENTITY]
    return "\n".join((*told, " ".join(library.common_flags())))


def _name(of: str) -> str:
    return f"rates-{hashlib.sha256(of.encode()).hexdigest()[:16]}.json"


def _read(path: Path, of: str) -> CoreRates | None:
    """The rates in the file; None if it is missing or invalid. Raises UntrustedFolder."""
    try:
        with open(open_trusted(path), "rb") as file:
            said = json.loads(file.read(_MOST_BYTES))
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(said, dict) or (said.get("version"), said.get("of")) != (_VERSION, of):
        return None
    rates = said.get("rates")
    if not isinstance(rates, dict) or rates.keys() != CoreRates.__annotations__.keys():
        return None
    if not all(isinstance(value, float) and 0 < value < math.inf for value in rates.values()):
        return None
    return CoreRates(**rates)


def _write(path: Path, of: str, rates: CoreRates) -> None:
    """Write the file whole or not at all, over an older one."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".rates-")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({"version": _VERSION, "of": of, "rates": asdict(rates)}, file, indent=1)
        temporary.rename(path)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()
