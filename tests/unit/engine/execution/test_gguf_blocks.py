"""Blocks of GGUF files: bit for bit the numbers of the format's own library, whole and apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire_engine.execution.models import gguf_blocks
from quire_engine.execution.models.gguf_blocks import dequantise, groups, stored_matrix, stored_type
from quire_engine.gguf import DECODED, KINDS
from quire_kernels.cpu.ops import cpu_kernel_set
from quire_kernels.cpu.stored import stored_bits
from quire_kernels.stored import StoredMatrix, in_common_form, joined
from support.gguf_blocks import QUANTISED, numbers, random_blocks


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int32)


def test_every_type_that_is_decoded_is_tested() -> None:
    assert set(QUANTISED) == DECODED


@pytest.mark.parametrize("kind", QUANTISED)
def test_numbers_have_the_bits_of_the_formats_library(kind: str) -> None:
    random = np.random.default_rng(7)
    rows = random_blocks(kind, 33, 512, random)
    found = dequantise(kind, torch.from_numpy(rows), 2)
    wanted = torch.from_numpy(numbers(kind, rows))
    assert found.dtype is torch.float32
    assert found.shape == (33, 512)
    assert torch.equal(bits(found), bits(wanted))
    assert 0.05 < found.abs().max() < 2  # of the size of weights, so that models of them have clear answers
    size = next(each for each in KINDS.values() if each.name == kind)
    assert rows.shape[1] == 512 // size.values * size.num_bytes


@pytest.mark.parametrize("kind", QUANTISED)
def test_every_byte_of_a_block_is_read_as_the_library_reads_it(kind: str) -> None:
    """Also scales that no quantiser writes, as long as they are finite numbers."""
    rows = np.random.default_rng(3).integers(0, 256, (64, random_blocks(kind, 1, 256, np.random.default_rng(0)).size))
    rows = rows.astype(np.uint8)
    with np.errstate(all="ignore"):
        wanted = torch.from_numpy(numbers(kind, rows))
    found = dequantise(kind, torch.from_numpy(rows), 1)
    finite = torch.isfinite(wanted)
    assert finite.float().mean() > 0.5
    assert torch.equal(torch.isfinite(found), finite)
    assert torch.equal(bits(found[finite]), bits(wanted[finite]))


@pytest.mark.parametrize("kind", QUANTISED)
def test_codes_and_scales_are_apart(kind: str) -> None:
    blocks = torch.from_numpy(random_blocks(kind, 8, 256, np.random.default_rng(5)))
    size = next(each.num_bytes for each in KINDS.values() if each.name == kind)
    found = groups(kind, blocks.reshape(-1, size))
    assert found.codes.dtype in {torch.uint8, torch.int8}
    assert found.codes.shape[2] in {16, 32}
    if found.table is not None:
        assert len(found.table) == 16
        assert int(found.codes.max()) < 16
    for steps in (found.steps, found.low_steps):
        assert steps is None or kind == "NVFP4" or bool((steps == steps.round()).all() and (steps.abs() < 256).all())
    assert found.scale.shape == (len(found.codes), 1)


@pytest.mark.parametrize("kind", QUANTISED)
def test_what_stays_stored_has_the_bits_of_the_formats_library(kind: str) -> None:
    rows = random_blocks(kind, 33, 768, np.random.default_rng(11))
    found, form = stored_matrix(kind, torch.from_numpy(rows), 2), stored_type(kind)
    assert torch.equal(found.dequantised(), torch.from_numpy(numbers(kind, rows)))
    assert (found.kind, found.group_size) == (form.kind, form.group_size)
    parts = [found.scales, found.scale_units, found.offsets, found.offset_units]
    beside = 8 * sum(part.nbytes for part in parts if part is not None)
    assert beside == form.beside * 33 * 768 / form.group_size


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0"])
def test_scales_that_are_not_finite_are_refused(kind: str) -> None:
    rows = random_blocks(kind, 3, 256, np.random.default_rng(1))
    at = {"Q4_K": 2, "Q6_K": 208, "Q8_0": 0}[kind]
    rows[1, at : at + 2] = np.array([np.inf], np.float16).view(np.uint8)
    with pytest.raises(ValueError, match="has scales that are not finite numbers"):
        stored_matrix(kind, torch.from_numpy(rows), 1)


def test_numbers_beyond_float32_are_found_though_their_scales_are_within() -> None:
    """A power of two that a scale may have, times the largest of its codes."""
    rows = random_blocks("MXFP4", 3, 64, np.random.default_rng(2))
    assert stored_matrix("MXFP4", torch.from_numpy(rows), 1).is_finite()
    rows[1, 0] = 254  # 2^126 for half of 12, 8, 6 and so on
    rows[1, 1:17] = 0x22
    assert stored_matrix("MXFP4", torch.from_numpy(rows), 1).is_finite()  # of the largest scale, but small codes
    rows[1, 5] = 0x72
    assert not stored_matrix("MXFP4", torch.from_numpy(rows), 1).is_finite()


@pytest.mark.parametrize(("code", "scale", "finite"), [(0x7E, 1.0, True), (0xFF, 1.0, False), (0x7E, 1e37, False)])
def test_floats_of_eight_bits_are_finite_but_for_their_nan(code: int, scale: float, finite: bool) -> None:
    codes = torch.full((2, 8), code, dtype=torch.uint8)
    scales = torch.full((2, 1), scale)
    assert StoredMatrix(kind="e4m3", codes=codes, group_size=8, scales=scales).is_finite() is finite


# Bits of a weight: of its code, and its share of what a group has beside codes.
BITS = {
    **{"Q4_0": 4.5, "Q4_1": 5.0, "Q5_0": 6.5, "Q5_1": 7.0, "Q8_0": 8.5, "Q2_K": 5.125, "Q3_K": 4.5625, "Q4_K": 4.625},
    **{"Q5_K": 6.625, "Q6_K": 6.5625, "IQ4_NL": 4.5, "IQ4_XS": 4.3125, "MXFP4": 4.5, "NVFP4": 5.0},
}


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_packed_matrix_takes_the_bits_that_its_type_has(kind: str) -> None:
    """What a token reads is what is stored, for the types that codes of four, six and eight bits fit."""
    rows = random_blocks(kind, 128, 768, np.random.default_rng(11))
    kernels, form = cpu_kernel_set(1), stored_type(kind)
    packed = (
        kernels.pack_stored([[stored_matrix(kind, torch.from_numpy(rows), 1)]], None) if kernels.pack_stored else None
    )
    assert packed is not None
    assert packed.parts["packed"].nbytes * 8 == BITS[kind] * 128 * 768
    assert stored_bits(form.kind, form.group_size, 768, form.beside) == BITS[kind]
    assert kind in {"Q2_K", "Q3_K", "Q5_0", "Q5_1", "Q5_K", "NVFP4"} or BITS[kind] <= 1.06 * rows.size * 8 / (128 * 768)


def test_any_two_types_have_a_form_in_common() -> None:
    matrices = [
        stored_matrix(kind, torch.from_numpy(random_blocks(kind, 3, 512, np.random.default_rng(place))), 1)
        for place, kind in enumerate(QUANTISED)
    ]
    for first in matrices:
        for second in matrices:
            alike, both = in_common_form([first, second]), joined([first, second])
            assert alike is not None
            assert both is not None
            for found, wanted in zip(alike, (first, second), strict=True):
                assert torch.equal(found.dequantised(), wanted.dequantised())
            assert torch.equal(both.dequantised(), torch.cat([first.dequantised(), second.dequantised()]))


def test_a_matrix_of_many_pieces_is_decoded_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_blocks, "_AT_ONCE", 3 * 256)
    rows = random_blocks("Q4_K", 100, 256, np.random.default_rng(9))
    with torch.inference_mode():
        found = dequantise("Q4_K", torch.from_numpy(rows), 4)
        kept = stored_matrix("Q4_K", torch.from_numpy(rows), 4).dequantised()
    assert torch.equal(found, torch.from_numpy(numbers("Q4_K", rows)))
    assert torch.equal(found, kept)
