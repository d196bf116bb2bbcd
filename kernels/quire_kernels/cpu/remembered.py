"""The rates that this CPU was measured at, in a file beside the compiled kernels.

Promises: a CPU is measured once, by one of the processes that start together; what is damaged, of another CPU, or not
ours alone is measured anew. Where nothing can be kept, every start measures.
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
# Of CPUs that say the same here each computes at the rates of the others. Not the clock, which is of the moment.
_IDENTITY = ("vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "flags")
_VERSION = 1  # of the file, and of how rates are measured
_MOST_BYTES = 1 << 16


def recalled(cache_dir: Path | None = None) -> CoreRates | None:
    """What was once measured on such a CPU; None where nobody has, or where it cannot be trusted."""
    of = identity()
    with suppress(OSError):
        return _read((cache_dir or library.default_cache()) / _name(of), of)
    return None


def remembered(measure: Callable[[], CoreRates], cache_dir: Path | None = None) -> CoreRates:
    """What was once measured, or what `measure` says now, kept in `cache_dir` (default: where the kernels are)."""
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
    """What the rates are of: a CPU, by its first processor, and what is measured, which may be made to be slow."""
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
    """What the file says of that; None where there is none, or nonsense in it. Raises UntrustedFolder."""
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
    """Whole or not at all, and over whatever was there."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".rates-")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({"version": _VERSION, "of": of, "rates": asdict(rates)}, file, indent=1)
        temporary.rename(path)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()
