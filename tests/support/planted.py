"""Planted bugs, for the tests of the tests: modules with one, and random runs that are to show it.

Promises: exactly one place of a copy is changed; the module itself stays as it is.
Must not know: what the module does.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

_numbers = itertools.count()


def noticed() -> tuple[type[Exception], ...]:
    """What a planted bug may raise: a test's assertion, or the sanitizer's fault where that one runs the kernels."""
    sanitizers = (sys.modules.get(name) for name in ("ttsem.sanitize", "__main__"))  # it is run as the program
    faults = (getattr(module, "KernelFault", None) for module in sanitizers)
    return (AssertionError, *(fault for fault in faults if fault is not None))


def show_a_fault(
    play: Callable[[int], object], seeds: int, *, as_one_of: tuple[type[Exception], ...], since: int = 0
) -> None:
    """Play until a planted bug raises one of these. Fails the test if it raises none in so many random runs.

    `since`: the seed to begin with, one that is known to show it; those below it come last.
    """
    for seed in (*range(since, seeds), *range(since)):
        try:
            play(seed)
        except as_one_of:
            return
    pytest.fail("it was not found")


def planted(module: ModuleType, old: str, new: str, folder: Path, *, within: ModuleType | None = None) -> ModuleType:
    """A copy of `module` in which `new` stands in place of `old`; with `within`, a copy of that, which imports it."""
    source = _source(module)
    assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {module.__name__}"
    copy = _load(source.replace(old, new), folder)
    if within is None:
        return copy
    imported = f"from {module.__name__} import"
    assert imported in _source(within), f"{within.__name__} does not import {module.__name__}"
    return _load(_source(within).replace(imported, f"from {copy.__name__} import"), folder)


def _source(module: ModuleType) -> str:
    assert module.__file__ is not None
    return Path(module.__file__).read_text(encoding="utf-8")


def _load(source: str, folder: Path) -> ModuleType:
    """From a file, since Triton reads a kernel's source."""
    name = f"planted_{next(_numbers)}"
    path = folder / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
