"""Runs kernel tests for an instruction set that this CPU lacks: `pytest -p support.emulated --emulate avx512_bf16 ...`.

Promises: the kernels' own sources, but for intrinsics and spelled-out instructions, which emulated_avx512.h does in
AVX2 and emulated_amx.h in plain C++; the only variant that tests then know. Must not know: any test.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from quire_kernels.cpu import library, variants

_HEADERS = [Path(__file__).with_name(f"emulated_{name}.h") for name in ("avx512", "amx")]
_REAL = frozenset({"avx2", "fma"})  # what the emulation itself needs
_TILES = frozenset({"amx_tile", "amx_bf16", "amx_int8"})
_BY_NAME = {variant.name: variant for variant in variants.VARIANTS if variant.features > _REAL}
_TERNARY = re.compile(r"_mm512_ternarylogic_epi\d+")
_INTRINSIC = re.compile(r"_mm512_(\w+)")
# asm("INSTRUCTIONS" : "+v"(ACC), "=&v"(TEMPORARY) : "v"(A), "v"(B)); the temporary not always.
_SPELLED = re.compile(
    r'asm\("(?P<text>[^"]+)" : "\+[vx]"\((?P<acc>[\w.]+)\)(?:, "=&[vx]"\(\w+\))?'
    r' : "[vx]"\((?P<a>[\w.]+)\), "[vx]"\((?P<b>[\w.]+)\)\);'
)
# asm volatile("INSTRUCTION ..." : : "i"(TILE), "r"(A) : "memory"); operands and memory not always.
_OF_TILES = re.compile(
    r'asm volatile\("(?P<name>\w+)[^"]*" : : (?P<operands>"[imr]"\(\w+\)(?:, )?)*(?: ?: "memory")?\);'
)
_OPERAND = re.compile(r'"[imr]"\((\w+)\)')


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--emulate", choices=sorted(_BY_NAME), help="the instruction set")


def pytest_configure(config: pytest.Config) -> None:
    name = config.getoption("--emulate")
    if name is None:
        return
    directory = tempfile.TemporaryDirectory(prefix="quire-emulated-")
    config.add_cleanup(directory.cleanup)
    folder = Path(directory.name)
    variant = emulated(_BY_NAME[name])
    emulate(library._source_folder(), folder, variant)
    variants.VARIANTS = (variant,)
    library._source_folder = lambda: folder


def emulated(asked: variants.Variant) -> variants.Variant:
    """What this CPU can run of it, and definitions for the rest. Where only the tiles are missing, these alone are
    emulated: it is then the real vectors that must agree with them."""
    others = asked.features - _TILES
    real = others if others < asked.features and others <= variants.cpu_features() else _REAL
    defines = (f"-DEMULATE_{feature}" for feature in sorted(asked.features - real))
    return replace(asked, features=real, flags=(*map(variants.flag_for, sorted(real)), *defines))


def emulate(sources: Path, folder: Path, variant: variants.Variant) -> None:
    """A copy of the sources that calls the headers' functions for what the `variant` defines."""
    vectors, tiles = (header.name for header in _HEADERS)
    real_vectors = "avx512f" in variant.features
    first = [tiles] if real_vectors else [vectors, tiles]
    for header in _HEADERS:
        (folder / header.name).write_text(header.read_text(encoding="utf-8"), encoding="utf-8")
    for source in [*sources.rglob("*.cpp"), *sources.rglob("*.h")]:
        text = "".join(f'#include "{name}"\n' for name in first) + source.read_text(encoding="utf-8")
        text = _OF_TILES.sub(_as_tile_call, text)
        if not real_vectors:
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


def _as_tile_call(spelled: re.Match[str]) -> str:
    return f"emulated::{spelled['name']}({', '.join(_OPERAND.findall(spelled[0]))});"
