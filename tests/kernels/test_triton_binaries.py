"""Where Triton's compiled kernels are loaded from: its own folder only where nobody else may write."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delitem(triton.knobs.cache.__dict__, "dir", raising=False)
    yield tmp_path / "cache"
    triton.knobs.cache.__dict__.pop("dir", None)


def test_its_own_folder_is_used_and_made_for_us_alone(kept: Path, caplog: pytest.LogCaptureFixture):
    from quire_kernels.triton.binaries import use_private_cache

    with caplog.at_level(logging.WARNING):
        use_private_cache()
    assert triton.knobs.cache.dir == str(kept)
    assert kept.stat().st_mode & 0o777 == 0o700
    assert caplog.records == []


@pytest.mark.parametrize("plant", ["writable", "link"])
def test_a_folder_of_others_is_not(kept: Path, plant: str, caplog: pytest.LogCaptureFixture):
    from quire_kernels.triton.binaries import use_private_cache

    if plant == "link":
        (kept.parent / "real").mkdir()
        kept.symlink_to(kept.parent / "real")
    else:
        kept.mkdir()
        kept.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        use_private_cache()
    private = Path(triton.knobs.cache.dir)
    assert private != kept
    assert private.stat().st_mode & 0o777 == 0o700
    (record,) = caplog.records
    assert str(kept) in record.getMessage()
    assert "they are compiled at every start" in record.getMessage()
