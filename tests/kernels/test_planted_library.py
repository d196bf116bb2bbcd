"""A kernel library that somebody else has put into the cache: never loaded, told in one line, and the kernels serve."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from quire_kernels.cpu import compiler, library
from quire_kernels.cpu.compiler import KernelBuildError, find_compiler
from quire_kernels.cpu.variants import VARIANTS

PORTABLE = VARIANTS[-1]
SOMEBODY = 12345
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
OURS = 'extern "C" __attribute__((visibility("default"))) int answer() { return 41; }\n'
THEIRS = """
#include <fcntl.h>
#include <stdlib.h>
extern "C" __attribute__((visibility("default"))) int answer() { return 666; }
__attribute__((constructor)) static void run() { open("MARK", O_CREAT | O_WRONLY, 0600); }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A cache with a planted library in it, under the very name that is looked for, whole as far as its digest says."""

    cache: Path
    planted: Path
    mark: Path  # there once the planted library has been loaded
    digested: bytes

    def load(self) -> int:
        answer: int = library.load_library(PORTABLE, cache_dir=self.cache).answer()
        return answer


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """Where the mark would be, and the two libraries: compiled once."""
    folder = tmp_path_factory.mktemp("compiled")
    mark = folder / "mark"
    libraries = {}
    for name, text in (("ours", OURS), ("theirs", THEIRS.replace("MARK", str(mark)))):
        (folder / f"{name}.cpp").write_text(text)
        compiler.compile_library(find_compiler(), [folder / f"{name}.cpp"], compiler.FLAGS, folder / name, jobs=1)
        libraries[name] = (folder / name).read_bytes()
    return mark, libraries


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: tuple[Path, dict[str, bytes]]) -> Scene:
    mark, libraries = compiled
    mark.unlink(missing_ok=True)
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "tiny.cpp").write_text(OURS)
    monkeypatch.setattr(library, "_PACKAGE", tmp_path)
    monkeypatch.setattr(library, "_PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(library, "declare", lambda _: None)
    monkeypatch.setattr(library, "compile_library", lambda *a, **_: a[3].write_bytes(libraries["ours"]))
    assert library.load_library(PORTABLE, cache_dir=tmp_path / "first").answer() == 41
    (kept,) = (tmp_path / "first").glob("*.so")
    cache = tmp_path / "parent" / "cache"
    cache.mkdir(mode=0o700, parents=True)
    digested = libraries["theirs"] + hashlib.sha256(libraries["theirs"]).digest()
    (cache / kept.name).write_bytes(digested)
    return Scene(cache=cache, planted=cache / kept.name, mark=mark, digested=digested)


def test_the_scene_is_one(scene: Scene):
    """With nothing wrong about it the library is taken for ours: what the other tests see would be loaded."""
    assert scene.load() == 666
    assert scene.mark.exists()


def away(path: Path) -> Path:
    """Moves it elsewhere and links to it."""
    target = path.with_name(f"{path.name}-elsewhere")
    path.rename(target)
    path.symlink_to(target)
    return target


FOLDERS = {
    "the folder is somebody else's": lambda s: os.chown(s.cache, SOMEBODY, -1),
    "its parent is somebody else's": lambda s: os.chown(s.cache.parent, SOMEBODY, -1),
    "its group may write to the folder": lambda s: s.cache.chmod(0o770),
    "all may write to the folder": lambda s: s.cache.chmod(0o777),
    "all may write to the folder, which is sticky": lambda s: s.cache.chmod(0o1777),
    "all may write to its parent": lambda s: s.cache.parent.chmod(0o777),
    "the folder is a link": lambda s: away(s.cache),
    "its parent is a link": lambda s: away(s.cache.parent),
}
FILES = {
    "the file is somebody else's": lambda s: os.chown(s.planted, SOMEBODY, -1),
    "its group may write to the file": lambda s: s.planted.chmod(0o660),
    "all may write to the file": lambda s: s.planted.chmod(0o646),
    "the file is a link": lambda s: away(s.planted),
    "the file has a second name": lambda s: os.link(s.planted, s.cache / "second"),
}


def cases(plants: dict[str, Callable[[Scene], object]]) -> list[object]:
    return [
        pytest.param(plant, id=name, marks=[AS_ROOT] if "somebody" in name else []) for name, plant in plants.items()
    ]


@pytest.mark.parametrize("plant", cases(FOLDERS))
def test_nothing_is_loaded_from_a_folder_of_others(
    scene: Scene, plant: Callable[[Scene], object], caplog: pytest.LogCaptureFixture
):
    plant(scene)
    with caplog.at_level(logging.WARNING):
        assert scene.load() == 41
    assert not scene.mark.exists()
    (record,) = caplog.records
    assert str(scene.cache.parent) in record.getMessage()
    assert "they are compiled at every start" in record.getMessage()
    assert "\n" not in record.getMessage()
    assert scene.planted.read_bytes() == scene.digested  # nor is anything written there


@pytest.mark.parametrize("plant", cases(FILES))
def test_a_file_of_others_is_replaced(scene: Scene, plant: Callable[[Scene], object], caplog: pytest.LogCaptureFixture):
    plant(scene)
    with caplog.at_level(logging.WARNING):
        assert scene.load() == 41
        assert scene.load() == 41
    assert not scene.mark.exists()
    (record,) = caplog.records
    assert str(scene.planted) in record.getMessage()
    assert "it is not loaded but compiled anew" in record.getMessage()
    assert not scene.planted.is_symlink()


def test_a_pipe_in_the_place_of_the_library_or_its_lock_is_not_waited_for(scene: Scene):
    for path in (scene.planted, scene.planted.with_suffix(".lock")):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    assert scene.load() == 41


def test_a_lock_that_is_a_link_is_not_followed(scene: Scene, tmp_path: Path):
    scene.planted.unlink()
    scene.planted.with_suffix(".lock").symlink_to(tmp_path / "made")
    assert scene.load() == 41
    assert not (tmp_path / "made").exists()


def test_without_a_home_the_kernels_are_compiled_for_this_process(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(library.Path, "home", staticmethod(homeless))
    with caplog.at_level(logging.WARNING):
        assert library.load_library(PORTABLE).answer() == 41
    (record,) = caplog.records
    assert "there is no home folder to keep compiled kernels in (set HOME)" in record.getMessage()


def test_a_disk_without_room_is_one_line(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    honest = library.compile_library

    def full(*args: object, **options: object) -> None:
        output = args[3]
        assert isinstance(output, Path)
        if scene.cache in output.parents:
            raise OSError("c++ finds no room to write to")
        honest(*args, **options)  # type: ignore[arg-type]

    scene.planted.unlink()
    monkeypatch.setattr(library, "compile_library", full)
    with caplog.at_level(logging.WARNING):
        assert scene.load() == 41
    (record,) = caplog.records
    assert "finds no room to write to" in record.getMessage()
    assert list(scene.cache.glob(".building-*")) == []


def test_where_there_is_room_nowhere_the_remedy_is_named(scene: Scene, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object, **__: object) -> None:
        raise OSError("c++ finds no room to write to")

    scene.planted.unlink()
    monkeypatch.setattr(library, "compile_library", full)
    with pytest.raises(KernelBuildError, match="finds no room to write to; set TMPDIR to a folder of yours with room"):
        scene.load()


@pytest.mark.parametrize("said", ["as: fatal error: /tmp/x.s: No space left on device", "ld: out: File too large"])
def test_a_compiler_without_room_is_told_from_one_that_refuses(monkeypatch: pytest.MonkeyPatch, said: str):
    class Done:
        returncode, stderr, stdout = 1, said, ""

    monkeypatch.setattr(compiler.subprocess, "run", lambda *_, **__: Done())
    with pytest.raises(OSError, match="c\\+\\+ finds no room to write to"):
        compiler._run(["c++"], 1.0)
