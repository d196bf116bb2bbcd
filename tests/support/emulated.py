"""Runs kernel tests for an instruction set that this CPU lacks: `pytest -p support.emulated --emulate avx512_bf16 ...`.

Promises: the kernels' own sources, but for intrinsics and spelled-out instructions, which emulated_avx512.h does in
AVX2; the only variant that tests then know. Must not know: any test.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from quire_kernels.cpu import library, variants

_HEADER = Path(__file__).with_name("emulated_avx512.h")
_REAL = ("avx2", "fma")  # what the emulation itself needs
_BY_NAME = {variant.name: variant for variant in variants.VARIANTS if {*_REAL} < variant.features}
_TERNARY = re.compile(r"_mm512_ternarylogic_epi\d+")
_INTRINSIC = re.compile(r"_mm512_(\w+)")
# asm("INSTRUCTIONS" : "+v"(ACC), "=&v"(TEMPORARY) : "v"(A), "v"(B)); the temporary not always.
_SPELLED = re.compile(
    r'asm\("(?P<text>[^"]+)" : "\+[vx]"\((?P<acc>[\w.]+)\)(?:, "=&[vx]"\(\w+\))?'
    r' : "[vx]"\((?P<a>[\w.]+)\), "[vx]"\((?P<b>[\w.]+)\)\);'
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--emulate", choices=sorted(_BY_NAME), help="the instruction set")


def pytest_configure(config: pytest.Config) -> None:
    name = config.getoption("--emulate")
    if name is None:
        return
    asked = _BY_NAME[name]
    directory = tempfile.TemporaryDirectory(prefix="quire-emulated-")
    config.add_cleanup(directory.cleanup)
    folder = Path(directory.name)
    _emulate(library._source_folder(), folder)
    defines = (f"-DEMULATE_{feature}" for feature in sorted(asked.features.difference(_REAL)))
    variant = replace(asked, features=frozenset(_REAL), flags=(*(f"-m{name}" for name in _REAL), *defines))
    variants.VARIANTS = (variant,)
    library._source_folder = lambda: folder


def _emulate(sources: Path, folder: Path) -> None:
    """A copy of the sources that calls the header's functions."""
    (folder / _HEADER.name).write_text(_HEADER.read_text(encoding="utf-8"), encoding="utf-8")
    for source in [*sources.rglob("*.cpp"), *sources.rglob("*.h")]:
        text = f'#include "{_HEADER.name}"\n{source.read_text(encoding="utf-8")}'
        text = _SPELLED.sub(_as_call, text)
        text = _TERNARY.sub("emulated::ternarylogic", text)
        text = _INTRINSIC.sub(r"emulated::\1", text)
        copy = folder / source.relative_to(sources)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(text, encoding="utf-8")


def _as_call(spelled: re.Match[str]) -> str:
    instructions = spelled["text"].removeprefix("%{vex%} ").split(r"\n\t")
    name = "_".join(instruction.split()[0] for instruction in instructions)
    return f"emulated::{name}({spelled['acc']}, {spelled['a']}, {spelled['b']});"
