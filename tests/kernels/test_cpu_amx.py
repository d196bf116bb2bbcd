"""The order in which the variant amx adds: tiles and vectors to the same bits, those of the order's description.

On a CPU with AMX these are its own tiles, elsewhere emulated ones; vectors are the CPU's wherever it has AVX-512.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from quire_kernels.cpu import library
from quire_kernels.cpu.compiler import KernelBuildError, find_compiler
from quire_kernels.cpu.variants import VARIANTS, compilable_variants, cpu_features, refusal
from support.emulated import emulate, emulated
from support.tile_order import bf16, tile_sum

PROGRAM = Path(__file__).with_name("tile_sums.cpp")
PANEL = 64
# The exponents of random activations and weights: of sums without anything special, of weights that are kept in twelve
# bits, of products that are denormal, of operands that are, of sums that overflow; all patterns, NaN and infinity too.
EXPONENTS = {
    "normal": ((117, 137), (117, 137)),
    "coded": ((117, 137), (116, 127)),
    "small": ((50, 64), (50, 70)),
    "denormal": ((0, 1), (190, 220)),
    "large": ((180, 205), (180, 205)),
    "any": ((0, 255), (0, 255)),
}


class Sums(NamedTuple):
    """[rows, 64] each."""

    coded: bool
    tiles: Tensor
    vectors: Tensor


@pytest.fixture(scope="module", params=["emulated", "real"])
def program(request, tmp_path_factory):
    amx = next((variant for variant in VARIANTS if variant.name == "amx"), None)
    if amx is None or not {"avx2", "fma"} <= cpu_features():
        pytest.skip("an x86-64 CPU with AVX2 emulates the tiles")
    folder, sources = tmp_path_factory.mktemp("tiles"), library._source_folder()
    if request.param == "real":
        if not amx.features <= cpu_features() or refusal(amx) is not None:
            pytest.skip("this CPU has no AMX")
        variant = amx
    else:
        variant = emulated(amx)
        emulate(sources, folder, variant)
        sources = folder
    try:
        compiler = find_compiler()
    except KernelBuildError as error:
        pytest.skip(str(error))
    first = [f"-include{header}" for header in sorted(folder.glob("emulated_*.h"))]
    path = folder / "tile_sums"
    command = [compiler.path, *library.FLAGS, "-O2", *variant.flags, f"-I{sources}", *first, str(PROGRAM), "-o", path]
    built = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert built.returncode == 0, built.stderr[:4000]
    return path


def random_operands(exponents: str, rows: int, k: int) -> tuple[Tensor, Tensor]:
    """Activations [rows, k] and weights [64, k] of random signs, mantissas and exponents; a few weights are 0."""
    generator = torch.Generator().manual_seed(rows * k)

    def random(low: int, high: int, *sizes: int) -> Tensor:
        signs = torch.randint(2, sizes, generator=generator) << 15
        mantissas = torch.randint(128, sizes, generator=generator)
        bits = signs | torch.randint(low, high + 1, sizes, generator=generator) << 7 | mantissas
        return bits.to(torch.uint16).view(torch.bfloat16)

    of_rows, of_weights = EXPONENTS[exponents]
    weights = random(*of_weights, PANEL, k)
    weights[5, 7] = weights[40, k - 1] = 0.0
    return random(*of_rows, rows, k), weights


def sums_of(program: Path, *products: tuple[Tensor, Tensor]) -> list[Sums]:
    """Of activations [rows, k] and weights [64, k]."""
    given = b""
    for x, weights in products:
        given += torch.tensor([len(x), x.shape[1] // 2], dtype=torch.int32).numpy().tobytes()
        given += b"".join(part.contiguous().view(torch.int16).numpy().tobytes() for part in (x, weights))
    answer = subprocess.run([program], input=given, capture_output=True, check=True, timeout=120).stdout
    found = []
    for x, _ in products:
        size = len(x) * PANEL * 4
        coded, tiles, vectors = answer[:4], answer[4 : 4 + size], answer[4 + size : 4 + 2 * size]
        answer = answer[4 + 2 * size :]
        floats = (torch.frombuffer(bytearray(part), dtype=torch.float32).view(-1, PANEL) for part in (tiles, vectors))
        found.append(Sums(bool(coded[0]), *floats))
    assert answer == b""
    return found


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, but for what a NaN looks like."""
    return torch.equal(torch.where(a.isnan(), 0, a.view(torch.int32)), torch.where(b.isnan(), 0, b.view(torch.int32)))


@pytest.mark.parametrize("exponents", EXPONENTS)
def test_tiles_add_as_described(program, exponents):
    x, weights = random_operands(exponents, 4, 96)
    (found,) = sums_of(program, (x, weights))
    lanes = [*range(0, PANEL, 3), 5, 40]
    expected = torch.tensor([[tile_sum(row, lane) for lane in numbers(weights[lanes])] for row in numbers(x)])
    assert same(found.tiles[:, lanes], expected)
    assert exponents != "large" or expected.isinf().any()
    assert exponents != "any" or expected.isnan().any()
    assert exponents != "small" or 0 < (expected == 0).sum() < expected.numel()


def numbers(bits: Tensor) -> list[list[float]]:
    return [[bf16(each & 0xFFFF) for each in row] for row in bits.view(torch.int16).tolist()]


@pytest.mark.parametrize("exponents", EXPONENTS)
def test_vectors_add_as_tiles_do(program, exponents):
    """One tile of rows and two, blocks of equal height and a last one that is not full; a slice and a part of one."""
    x, weights = random_operands(exponents, 70, 2 * 16 * 19)
    for found in sums_of(program, *((x[:rows], weights) for rows in (1, 5, 16, 17, 31, 32, 33, 69, 70))):
        assert found.coded == (exponents == "coded")
        assert same(found.tiles, found.vectors)


def test_a_row_does_not_depend_on_the_others(program):
    x, weights = random_operands("normal", 70, 64)
    whole, *parts = sums_of(program, (x, weights), *((x[-rows:], weights) for rows in range(1, 70)))
    for rows, part in enumerate(parts, start=1):
        assert torch.equal(part.tiles, whole.tiles[-rows:]), rows


OURS = """
  quire::tile_load<4>(at, stride);
  quire::tile_zero<1>();
  quire::tile_dot_bf16<0, 4, 6>();
  quire::tile_dot_u8s8<1, 5, 6>();
  quire::tile_dot_s8u8<2, 4, 7>();
  quire::tile_dot_s8<3, 5, 7>();
  quire::tile_store<3>(to, stride);
  quire::tile_shapes.first = 1;
  quire::release_tiles();
"""
COMPILERS = """
  _tile_loadd(4, at, stride);
  _tile_zero(1);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbusd(1, 5, 6);
  _tile_dpbsud(2, 4, 7);
  _tile_dpbssd(3, 5, 7);
  _tile_stored(3, to, stride);
  _tile_release();
"""


def test_what_is_spelled_out_are_the_compilers_own_instructions():
    """The emulation goes by the operands beside the text; that the text is right as well is seen without any AMX."""
    amx = next((variant for variant in compilable_variants() if variant.name == "amx"), None)
    if amx is None:
        pytest.skip("for x86-64")
    ours, compilers = (instructions(body, amx.flags) for body in (OURS, COMPILERS))
    assert len(ours) == 8
    assert ours == compilers


def instructions(body: str, flags: tuple[str, ...]) -> list[str]:
    """Those of tiles that a function of this body has."""
    try:
        compiler = find_compiler()
    except KernelBuildError as error:
        pytest.skip(str(error))
    text = f'#include "simd/tiles.h"\nvoid f(const void* at, long stride, void* to) {{{body}}}\n'
    command = [compiler.path, *library.FLAGS, *flags, f"-I{library._source_folder()}", "-S", "-xc++", "-", "-o", "-"]
    made = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=100)
    if made.returncode != 0 and "unrecognized" in made.stderr:
        pytest.skip(f"{compiler.path} knows no AMX")
    assert made.returncode == 0, made.stderr
    found = re.findall(r"^\s*(tdp\w+|tile(?:load|store|zero|release)\w*)[ \t]*([^#\n]*)$", made.stdout, re.MULTILINE)
    return [f"{name} {operands.replace(' ', '')}" for name, operands in found]
