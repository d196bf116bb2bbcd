"""The reader of GGUF files: what it reads, and one line for what is wrong with a file."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from quire_engine.contract.errors import ModelLoadError
from quire_engine.gguf import KINDS, Gguf, keep_typed_name, read_gguf, shortest, typed_name
from support.gguf_files import TYPES, Stored, Typed, gguf_bytes, text, value_bytes, write_gguf, write_shards

VALUES: dict[str, Any] = {
    "general.architecture": "llama",
    "a.u8": Typed("u8", 255),
    "a.i8": Typed("i8", -128),
    "a.u16": Typed("u16", 65535),
    "a.i16": Typed("i16", -32768),
    "a.u32": Typed("u32", 4294967295),
    "a.i32": Typed("i32", -5),
    "a.f32": 1e-6,
    "a.bool": True,
    "a.u64": Typed("u64", 1 << 63),
    "a.i64": Typed("i64", -(1 << 62)),
    "a.f64": Typed("f64", 0.1),
    "a.texts": ["one", "", "drei, ☃"],
    "a.numbers": [1, 2, 3],
    "a.floats": [0.5, -1.5],
    "a.bools": Typed("bool", [True, False]),
    "a.none": Typed("u32", []),
}
ROW = Stored("row", "F32", (3,), struct.pack("<3f", 1.0, 0.1, -2.5))
MATRIX = Stored("matrix", "Q4_0", (2, 64), bytes(range(72)))


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 256])
def test_everything_that_a_file_holds_is_read(version: int, alignment: int, tmp_path: Path) -> None:
    values = VALUES | {"general.alignment": alignment}
    path = write_gguf(tmp_path / "x.gguf", values, [ROW, MATRIX], version=version, alignment=alignment)
    found = read_gguf(path)
    plain = {key: value.value if isinstance(value, Typed) else value for key, value in values.items()}
    assert {key: found.metadata.raw(key) for key in sorted(found.metadata.keys())} == plain
    assert found.files == (path,)
    assert found.tensors["matrix"].shape == (2, 64)
    assert found.tensors["matrix"].kind.name == "Q4_0"
    data = path.read_bytes()
    for tensor in (ROW, MATRIX):
        place = found.tensors[tensor.name]
        assert place.offset % alignment == 0
        assert data[place.offset : place.offset + place.num_bytes] == tensor.data
    assert found.floats("row") == [1.0, 0.1, -2.5]


def test_files_of_llama_cpps_own_library_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["a", "b"])
    writer.add_tensor("row", np.arange(5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_gguf(path)
    assert found.metadata.number("llama.attention.layer_norm_rms_epsilon") == 1e-5
    assert found.metadata.texts("tokenizer.ggml.tokens") == ["a", "b"]
    assert found.floats("row") == [0.0, 1.0, 2.0, 3.0, 4.0]
    sizes = {kind.name: sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {kind.name: (kind.values, kind.num_bytes) for kind in KINDS.values()} == sizes
    assert {number: kind.name for number, kind in KINDS.items()} == {
        int(kind): kind.name for kind in gguf.GGML_QUANT_SIZES
    }
    reader = gguf.GGUFReader(write_gguf(tmp_path / "ours.gguf", VALUES, [ROW, MATRIX]))  # what the tests write
    assert [tensor.name for tensor in reader.tensors] == ["row", "matrix"]
    assert reader.fields["a.texts"].contents() == VALUES["a.texts"]


def test_files_that_belong_together_are_one_model(tmp_path: Path) -> None:
    first = write_shards(tmp_path, "x", VALUES, [[], [ROW], [MATRIX]])
    found = read_gguf(first)
    assert [path.name for path in found.files] == [f"x-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    assert found.tensors["matrix"].file == found.files[2]
    assert found.floats("row") == [1.0, 0.1, -2.5]


def test_numbers_are_the_decimals_that_were_written() -> None:
    for value in (1e-6, 1e-05, 0.1, 1e6, 5e5, 0.22, 1.0, 0.0, -3.25, 1 / 3):
        (stored,) = struct.unpack("<f", struct.pack("<f", value))
        assert struct.pack("<f", shortest(stored)) == struct.pack("<f", value)
        assert shortest(stored) == value or value == 1 / 3
    assert shortest(float("inf")) == float("inf")
    assert shortest(3.4028234663852886e38) == pytest.approx(3.4028235e38)


def refusal(path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        read_gguf(path)
    line = str(caught.value)
    assert "\n" not in line
    assert str(path.parent) in line
    return line


GOOD = gguf_bytes(VALUES, [ROW, MATRIX])


def header(num_tensors: int, num_values: int, rest: bytes, *, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_values) + rest + bytes(64)


def entry(
    name: str = "t", shape: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0, count: int | None = None
) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape) if count is None else count, *shape)
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


HUGE = (1 << 64) - 1
DAMAGES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "does not begin with GGUF"),
    "another format": (b"PK\3\4" + bytes(60), "does not begin with GGUF"),
    "only the mark": (b"GGUF", "does not begin with GGUF"),
    "version 1": (header(0, 0, b"", version=1), "version 1 of the format is not read, only 2 and 3"),
    "version of the future": (header(0, 0, b"", version=4), "version 4"),
    "big endian": (header(0, 0, b"", version=0x03000000), "most significant byte first"),
    "values beyond the file": (header(0, HUGE, b""), "bytes are announced"),
    "tensors beyond the file": (header(HUGE, 0, b""), "bytes are announced"),
    "a key beyond the file": (header(0, 1, struct.pack("<Q", HUGE)), "at most 65535 are possible"),
    "a key that is cut": (header(0, 1, struct.pack("<Q", 5000)), "5000 bytes are announced"),
    "an empty key": (header(0, 1, text("") + value_bytes(1)), "not a name that can be printed"),
    "a key of two lines": (header(0, 1, text("a\nb") + value_bytes(1)), "not a name that can be printed"),
    "a key that is not UTF-8": (header(0, 1, text(b"\xff\xfe") + value_bytes(1)), "is not UTF-8"),
    "two keys of a name": (header(0, 2, (text("a") + value_bytes(1)) * 2), "key 'a': there are two of that name"),
    "a text that is not UTF-8": (header(0, 1, text("a") + value_bytes(b"\x80")), "key 'a': a string is not UTF-8"),
    "a text beyond the file": (
        header(0, 1, text("a") + struct.pack("<IQ", 8, HUGE)),
        "key 'a': a string of 18446744073709551615 bytes",
    ),
    "an unknown type": (header(0, 1, text("a") + struct.pack("<II", 13, 0)), "13 is no type of a value"),
    "a list of lists": (header(0, 1, text("a") + struct.pack("<IIQ", 9, 9, 1)), "lists of lists are not read"),
    "a list beyond the file": (
        header(0, 1, text("a") + struct.pack("<IIQ", 9, 4, 1 << 61)),
        "key 'a': 9223372036854775808 bytes are announced",
    ),
    "texts beyond the file": (header(0, 1, text("a") + struct.pack("<IIQ", 9, 8, 1 << 40)), "are announced"),
    "a truth of 2": (header(0, 1, text("a") + struct.pack("<IB", 7, 2)), "neither 0 nor 1"),
    "alignment 0": (gguf_bytes({"general.alignment": 0}), "general.alignment=0 must be a power of 2"),
    "alignment 48": (gguf_bytes({"general.alignment": 48}), "general.alignment=48"),
    "alignment in words": (gguf_bytes({"general.alignment": "32"}), "general.alignment must be an integer"),
    "no dimensions": (header(1, 0, entry(count=0)), "tensor 't': 0 dimensions"),
    "many dimensions": (header(1, 0, entry(count=5)), "5 dimensions; possible are 1 to 4"),
    "a dimension of 0": (header(1, 0, entry(shape=(4, 0))), "is not made of F32 blocks"),
    "absurd dimensions": (header(1, 0, entry(shape=(HUGE, HUGE, HUGE, HUGE))), "does not fit the file's"),
    "a row that is no whole block": (header(1, 0, entry(shape=(33,), kind=2)), "is not made of Q4_0 blocks of 32"),
    "a withdrawn type": (header(1, 0, entry(kind=31)), "type 31 is unknown; quantise the model again"),
    "an odd offset": (header(1, 0, entry(offset=4)), "offset 4 is not a multiple of 32"),
    "an offset beyond": (header(1, 0, entry(offset=1 << 40)), "does not fit the file's"),
    "an offset that overflows": (header(1, 0, entry(offset=(1 << 64) - 32)), "does not fit the file's"),
    "data that is cut": (GOOD[:-100], "the file is damaged or cut"),
    "two tensors of a name": (header(2, 0, entry() + entry(offset=32)), "tensor 't': there are two of that name"),
    "two tensors in one place": (header(2, 0, entry("a", (16,)) + entry("b", (16,), offset=32)), "in the same place"),
    "a name of two lines": (header(1, 0, entry("a\nb")), "not a name that can be printed"),
    "no UTF-8 in a name": (header(1, 0, text(b"\xc3") + entry()), "is not UTF-8"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_one_line_that_names_file_and_key(damage: str, tmp_path: Path) -> None:
    data, reason = DAMAGES[damage]
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    assert reason in refusal(path)


def test_every_beginning_of_a_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    for length in range(len(GOOD) - -len(MATRIX.data) % 32):
        path.write_bytes(GOOD[:length])
        refusal(path)


def broken(folder: Path, change: Callable[[list[Path]], None]) -> Path:
    first = write_shards(folder, "x", VALUES, [[ROW], [MATRIX]])
    change(sorted(folder.iterdir()))
    return first


def test_files_that_do_not_belong_together_are_one_line(tmp_path: Path) -> None:
    def folder() -> Path:
        made = tmp_path / str(len(list(tmp_path.iterdir())))
        made.mkdir()
        return made

    assert "x-00002-of-00002.gguf: missing" in refusal(broken(folder(), lambda paths: paths[1].unlink()))
    second = broken(folder(), lambda _: None).with_name("x-00002-of-00002.gguf")
    assert "name the first" in refusal(second)
    assert "x-00001-of-00002.gguf" in refusal(second)
    renamed = broken(folder(), lambda paths: paths[0].rename(paths[0].with_name("y.gguf")))
    assert "split.count=2, the name is that of one of 1" in refusal(renamed.with_name("y.gguf"))
    alone = write_gguf(folder() / "x-00001-of-00001.gguf", VALUES, [ROW])
    assert read_gguf(alone).tensors.keys() == {"row"}
    twice = broken(folder(), lambda paths: paths[1].write_bytes(paths[0].read_bytes()))
    assert "split.no and split.count are not 1 and 2" in refusal(twice)
    again = write_shards(folder(), "x", VALUES, [[ROW], [ROW]])
    assert "tensor 'row' is also in x-00001-of-00002.gguf" in refusal(again)
    less = write_gguf(folder() / "x.gguf", VALUES | {"split.tensors.count": 3}, [ROW])
    assert "split.tensors.count=3, but the files hold 1 tensors" in refusal(less)
    many = write_gguf(folder() / "x-00001-of-99999.gguf", VALUES, [ROW])
    assert "one of 99999 files" in refusal(many)


def test_what_is_no_file_is_one_line(tmp_path: Path) -> None:
    assert "missing" in refusal(tmp_path / "none.gguf")
    assert "not a plain file" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "not a plain file" in refusal(tmp_path / "pipe.gguf")  # and is not waited for


def asked(call: Callable[[Gguf], object], tmp_path: Path) -> str:
    found = read_gguf(write_gguf(tmp_path / "x.gguf", VALUES, [ROW, MATRIX]))
    with pytest.raises(ModelLoadError) as caught:
        call(found)
    return str(caught.value)


def test_a_value_of_another_type_is_named(tmp_path: Path) -> None:
    for call, reason in (
        (lambda found: found.metadata.integer("a.f32"), "a.f32 must be an integer from 0 to 2147483647, not 1e-06"),
        (lambda found: found.metadata.integer("a.bool"), "a.bool must be an integer"),
        (lambda found: found.metadata.integer("none"), "none is missing"),
        (lambda found: found.metadata.number("a.i32"), "a.i32 must be a number from 0, not -5"),
        (lambda found: found.metadata.boolean("a.u8", True), "a.u8 must be true or false, not 255"),
        (lambda found: found.metadata.text("a.texts"), "a.texts must be a string, not a list of 3"),
        (lambda found: found.metadata.texts("a.numbers"), "a.numbers must be a list of strings"),
        (lambda found: found.metadata.integers("a.floats"), "a.floats must be a list of whole numbers"),
        (lambda found: found.metadata.floats("a.texts"), "a.texts must be a list of numbers"),
        (lambda found: found.floats("matrix"), "tensor matrix is Q4_0 [2, 64], not a row of F32"),
    ):
        assert reason in asked(call, tmp_path)
    found = read_gguf(tmp_path / "x.gguf").metadata
    assert found.texts("none") == []
    assert found.integers("none") is None
    assert found.floats("none") is None
    assert found.integer("none", 7) == 7
    found.text("general.architecture")
    assert "general.architecture" not in found.unread("general.")
    assert "a.u8" in found.unread("a.")


def test_the_sizes_that_tests_write_are_the_readers() -> None:
    assert all(KINDS[number][:] == (name, values, size) for name, (number, values, size) in TYPES.items())


@pytest.mark.parametrize(
    ("said", "main"), [(15, "Q4_K_M"), (3 + 1024, "Q4_1"), (999, "Q4_0"), (None, "Q4_0"), ("Q9", "Q4_0")]
)
def test_the_type_of_a_file_is_what_it_says_or_what_most_of_it_is(said: object, main: str, tmp_path: Path) -> None:
    metadata = {"general.architecture": "x"} | ({} if said is None else {"general.file_type": said})
    assert read_gguf(write_gguf(tmp_path / "x.gguf", metadata, [ROW, MATRIX])).main_type == main


def test_a_folder_that_stands_for_a_file_is_called_as_the_user_did(tmp_path: Path) -> None:
    assert typed_name(tmp_path / "config.json") == str(tmp_path / "config.json")
    keep_typed_name(tmp_path, "org/repository:Q4_K_M")
    for path in (tmp_path, str(tmp_path), tmp_path / "config.json"):
        assert typed_name(path) == "org/repository:Q4_K_M"
