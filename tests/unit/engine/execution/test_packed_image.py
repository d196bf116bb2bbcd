"""An image of packed weights in memory: what lies where, who may read it, and that nobody can change it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire_engine.execution.packed.image import (
    HEADER_BYTES,
    SECTION_BYTES,
    BadHeader,
    Header,
    ImageWriter,
    decode_header,
    is_sealed,
    new_memory,
    open_image,
)

HEADER = Header(
    key="k",
    num_bytes=HEADER_BYTES + SECTION_BYTES + (2 << 20),
    tensors={"norm": (HEADER_BYTES, 128, (64,))},
    facts={"layer": {"n": 3}},
    parts={"layer": {"packed": (HEADER_BYTES + 128, 640)}},
    checksums=(1, -2),
)


@pytest.fixture
def fd() -> Iterator[int]:
    handle = new_memory()
    yield handle
    os.close(handle)


def filled(fd: int, *, most_bytes: int = 10 << 20) -> ImageWriter:
    writer = ImageWriter(fd, "key", most_bytes, lambda _: None)
    writer.place("norm", (3, 7), torch.bfloat16).copy_(torch.arange(21).view(3, 7))
    part = writer.allocate(9 << 20)
    part[-1] = 7
    writer.put_matrix("layer", {"n": 5}, {"packed": part})
    return writer


def test_a_header_comes_back():
    assert decode_header(HEADER.encode()) == HEADER
    assert len(HEADER.encode()) == HEADER_BYTES


@pytest.mark.parametrize("at", [0, 15, 16, 20, 30, 60, 100])
def test_a_damaged_header_is_refused(at):
    data = bytearray(HEADER.encode())
    data[at] ^= 1
    with pytest.raises(BadHeader):
        decode_header(bytes(data))


@pytest.mark.parametrize(
    "changes",
    [
        {"tensors": {"norm": (64, 128, (64,))}},
        {"tensors": {"norm": (HEADER_BYTES + 1, 128, (64,))}},
        {"parts": {"layer": {"packed": (HEADER.num_bytes - 64, 128)}}},
        {"parts": {"layer": {"packed": (HEADER_BYTES, -64)}}},
        {"checksums": (1,)},
    ],
)
def test_a_header_that_points_elsewhere_is_refused(changes):
    with pytest.raises(BadHeader):
        decode_header(replace(HEADER, **changes).encode())


@pytest.mark.parametrize("data", [b"", b"x" * HEADER_BYTES, HEADER.encode()[:-1]])
def test_what_is_no_header_is_refused(data):
    with pytest.raises(BadHeader):
        decode_header(data)


def test_another_descriptor_of_the_memory_shows_the_same(fd):
    filled(fd).seal(None, 1)
    other = os.dup(fd)
    image = open_image(other, "key")
    os.close(other)
    assert image is not None
    assert torch.equal(image.tensor("norm", torch.bfloat16), torch.arange(21).view(3, 7).bfloat16())
    facts, parts = image.matrix("layer")
    assert facts == {"n": 5}
    assert parts["packed"][-1] == 7
    assert image.num_bytes == os.fstat(fd).st_size == 12 << 20  # huge pages, the header's among them


def test_only_what_was_sealed_and_asked_for_is_opened(fd):
    writer = filled(fd)
    assert open_image(fd, "key") is None
    assert not is_sealed(fd)
    writer.seal(None, 1)
    assert open_image(fd, "another") is None
    assert open_image(fd, "key") is not None
    with open(__file__, "rb") as file:
        assert open_image(file.fileno(), "key") is None


def test_nobody_can_change_a_sealed_image(fd):
    filled(fd).seal(None, 1)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", HEADER_BYTES)
    for size in (0, 64 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)


def test_a_mapped_image_is_read_only(fd):
    filled(fd).seal(None, 1)
    image = open_image(fd, "key")
    assert image is not None
    address = image.tensor("norm", torch.bfloat16).data_ptr()
    flags = next(
        line.split()[1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if int(line.split("-")[0], 16) <= address < int(line.split()[0].split("-")[1], 16)
    )
    assert flags == "r--p"


def test_sections_have_their_checksums(fd):
    def total(address: int, count: int) -> int:
        return sum(ctypes.string_at(address, count))

    header = filled(fd).seal(total, 2)
    norm = sum(torch.arange(21).bfloat16().view(torch.uint8).tolist())
    assert header.checksums == (norm, 7)  # 8 MiB with the norm; what is left, with the last byte


def test_more_than_was_said_does_not_fit(fd):
    with pytest.raises(MemoryError):
        filled(fd, most_bytes=7 << 20)


def test_what_is_filled_is_told(fd):
    told: list[int] = []
    writer = ImageWriter(fd, "key", 1 << 20, told.append)
    writer.place("norm", (5,), torch.bfloat16)
    writer.tell_used()
    assert told == [HEADER_BYTES + 64]
    writer.close()
