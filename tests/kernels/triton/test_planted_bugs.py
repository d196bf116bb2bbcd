"""Tests of the tests: a bug is planted in a copy of the kernels, and one of the simulators must find it."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

import quire_kernels.triton
from support.triton_attention import Sequences, shape_of

BOTH = ("interpreter", "sanitizer")


class Bug(NamedTuple):
    name: str
    file: str
    code: str
    planted: str
    found_by: tuple[str, ...]


BUGS = (
    Bug(
        "an unmasked store",
        "decode_attention.py",
        "tl.store(out + place, (values / total[:, None]).to(out.dtype.element_ty), mask=held)",
        "tl.store(out + place, (values / total[:, None]).to(out.dtype.element_ty))",
        ("sanitizer",),
    ),
    Bug(
        "a read past the table",
        "softmax.py",
        "tl.load(table + positions // PAGE, mask=present, other=0)",
        "tl.load(table + positions // PAGE)",
        ("sanitizer",),
    ),
    Bug("two parts in one slot", "decode_attention.py", "* max_parts + slot", "* max_parts", BOTH),
    Bug(
        "an unwritten part",
        "decode_attention.py",
        "        tl.store(part_sums + totals + kept, total, mask=members < GROUP)\n",
        "",
        BOTH,
    ),
    Bug(
        "an unmasked value",
        "softmax.py",
        "tl.load(place + KV_HALF, mask=there, other=0)",
        "tl.load(place + KV_HALF)",
        BOTH,
    ),
    Bug("a row that sees the next", "softmax.py", "visible = distance >= 0", "visible = distance >= -1", BOTH),
    Bug("a window one too wide", "softmax.py", "distance < WINDOW", "distance <= WINDOW", BOTH),
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug, simulator, tmp_path, monkeypatch):
    if simulator not in bug.found_by:
        pytest.skip(f"for {' and '.join(bug.found_by)}")
    ops = _planted(bug, tmp_path, monkeypatch).TritonAttention()
    with pytest.raises(Exception) as found:
        _try(ops)
    assert found.type.__name__ in ("AssertionError", "KernelFault")


def test_the_copy_itself_is_sound(tmp_path, monkeypatch):
    _try(_planted(Bug("none", "softmax.py", "", "", BOTH), tmp_path, monkeypatch).TritonAttention())


def _try(ops) -> None:
    """Full and partial blocks and tiles, one part and several, one row and several, with and without a window."""
    slices = [(0, 63, 1), (1, 299, 1), (2, 0, 20), (3, 309, 21)]
    for window in (None, 40):
        sequences = Sequences([64, 300, 20, 330], shape_of(2, 1, 32, window))
        sequences.check(slices, ops=ops)


def _planted(bug: Bug, folder: Path, monkeypatch):
    """The attention of a copy of the package: Triton reads a kernel's source from its file."""
    package = "planted_" + bug.name.replace(" ", "_")
    shutil.copytree(Path(quire_kernels.triton.__file__).parent, folder / package)
    for path in (folder / package).glob("*.py"):
        text = path.read_text(encoding="utf-8").replace("quire_kernels.triton", package)
        if path.name == bug.file and bug.code:
            assert text.count(bug.code) == 1, "the code has changed: plant the bug anew"
            text = text.replace(bug.code, bug.planted)
        path.write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    return importlib.import_module(f"{package}.attention")
