"""Files that others name: what is no regular file, too large, too slow or no path at all is an error of one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire_engine.plain_files import is_plain, open_plain, read_plain


def test_a_regular_file_is_read_whole_up_to_the_bound(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(3 << 20) + b"end")
    (tmp_path / "link").symlink_to(file)
    assert read_plain(tmp_path / "link", (3 << 20) + 3) == file.read_bytes()
    with pytest.raises(OSError, match="larger than 3145730 bytes"):
        read_plain(file, (3 << 20) + 2)
    assert is_plain(file)


@pytest.mark.parametrize("name", ["pipe", ".", "device", "x" * 256, "a\0b", "absent", "loop"])
def test_what_is_no_regular_file_raises_at_once(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OSError) as refused:
        open_plain(tmp_path / name)
    assert refused.value.strerror
    assert not is_plain(tmp_path / name)


def test_a_disk_that_takes_too_long_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    with pytest.raises(TimeoutError, match="not read within -1 seconds"):
        read_plain(tmp_path / "file", seconds=-1)
