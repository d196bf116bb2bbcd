"""What is recorded of published signatures, and the script that reads them."""

from __future__ import annotations

import hashlib
import inspect
import io
import tarfile
import zipfile

import pytest

from support.flash_signatures import read, recorded, signature

FILE = "flash_attn/flash_attn_interface.py"
SOURCE = b"""
import no_such_module

def flash_attn_varlen_func(q, k, window_size=(-1, -1), *, softcap=0.0, block_table: object = None): ...

def flash_attn_with_kvcache(q): ...
"""


def sdist(folder, content: bytes = SOURCE):
    path = folder / "flash_attn-2.9.0.tar.gz"
    with tarfile.open(path, "w:gz") as file:
        info = tarfile.TarInfo(f"flash_attn-2.9.0/{FILE}")
        info.size = len(content)
        file.addfile(info, io.BytesIO(content))
    return path


def test_a_source_distribution_is_read_and_not_imported(tmp_path):
    varlen, _ = read(sdist(tmp_path))
    assert (varlen["package"], varlen["version"], varlen["file"]) == ("flash-attn", "2.9.0", FILE)
    assert varlen["sha256"] == hashlib.sha256(SOURCE).hexdigest()
    assert str(signature(varlen)) == "(q, k, window_size=(-1, -1), *, softcap=0.0, block_table=None)"


def test_wheels_and_folders_are_read_too(tmp_path):
    path, content = "torch/nn/attention/varlen.py", b"def varlen_attn(query, *, scale=None): ..."
    wheel = tmp_path / "torch-2.99.1+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(path, content)
    folder = tmp_path / "torch-2.99.1"
    (folder / path).parent.mkdir(parents=True)
    (folder / path).write_bytes(content)
    assert read(wheel) == read(folder)
    assert read(folder)[0]["version"] == "2.99.1"
    assert str(signature(read(folder)[0])) == "(query, *, scale=None)"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "there are 0 functions"),
        (SOURCE + SOURCE, "there are 2 functions"),
        (SOURCE.replace(b"*, softcap=0.0", b"*softcap"), "takes more than what has a name"),
        (b"def flash_attn_varlen_func(", "was never closed"),
    ],
)
def test_what_cannot_be_recorded_is_an_error(tmp_path, content, said):
    with pytest.raises((ValueError, SyntaxError), match=said):
        read(sdist(tmp_path, content))
    with pytest.raises(ValueError, match="NAME-VERSION"):
        read(tmp_path / "flash_attn.tar.gz")


def test_every_recorded_signature_can_be_made():
    versions = {(each["package"], each["version"]) for each in recorded()}
    assert {("flash-attn", "2.8.3.post2"), ("torch", "2.11.0"), ("torch", "2.12.0"), ("torch", "2.13.0")} <= versions
    for each in recorded():
        assert isinstance(signature(each), inspect.Signature)
        assert len(each["sha256"]) == 64
