"""Building and finding the compiled kernels: cached, shared between processes, whole or not at all."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quire_kernels.cpu import build, choice, compiler, library, variants
from quire_kernels.cpu.compiler import KernelBuildError
from quire_kernels.cpu.variants import VARIANTS, compilable_variants, usable_variants
from quire_kernels.kernel_set import KVFormat
from quire_kernels.reference import REFERENCE
from quire_kernels.select import select

CPU = torch.device("cpu")
KV = KVFormat(head_dim=64, block_size=16)
TINY = 'extern "C" __attribute__((visibility("default"))) int answer() { return %d; }\n'
PORTABLE = VARIANTS[-1]


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A library of one small file instead of the kernels; its folder."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "tiny.cpp").write_text(TINY % 41)
    (folder / "tiny.h").write_text("")
    monkeypatch.setattr(library, "_PACKAGE", tmp_path)
    monkeypatch.setattr(library, "_PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(library, "declare", lambda _: None)
    return folder


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def load(cache, **options):
    return library.load_library(PORTABLE, cache_dir=cache, **options)


def forbid_compiling(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("compiled again")

    monkeypatch.setattr(library, "compile_library", refuse)


def test_every_variant_of_this_cpu_is_built_for_itself():
    assert usable_variants()[-1] == PORTABLE
    for variant in usable_variants():
        assert library.load_library(variant).quire_variant().decode() == variant.name


def test_what_was_built_is_found_again(sources, cache, monkeypatch, capfd):
    assert load(cache).answer() == 41
    assert "compiling the CPU kernels (portable)" in capfd.readouterr().err
    forbid_compiling(monkeypatch)
    assert load(cache).answer() == 41
    assert capfd.readouterr().err == ""
    assert [path.suffix for path in sorted(cache.iterdir())] == [".lock", ".so"]


def test_how_far_it_is_is_told(sources, cache, monkeypatch, capfd):
    for name in ("a", "b"):
        (sources / f"{name}.cpp").write_text("")
    monkeypatch.setattr(library, "_SECONDS_BETWEEN_LINES", 0.0)
    assert load(cache).answer() == 41
    lines = capfd.readouterr().err.splitlines()
    assert ["compiled 1 of 3 files" in lines[1], "compiled 2 of 3 files" in lines[2]] == [True, True]
    assert lines[0].startswith("quire: compiling the CPU kernels (portable), 3 files, with ")
    assert lines[-1].startswith("quire: compiled the CPU kernels in ")
    assert len(lines) == 4


def test_a_file_that_does_not_compile_ends_the_build(sources, cache, monkeypatch):
    for name in "abcdef":
        (sources / f"{name}.cpp").write_text("")
    (sources / "broken.cpp").write_text("#error broken on purpose " + "x" * 2000)  # the longest, so the first
    compiled = []
    real = compiler._run
    monkeypatch.setattr(compiler, "_run", lambda command, timeout: (compiled.append(command), real(command, timeout)))
    monkeypatch.setattr(library.os, "sched_getaffinity", lambda _: {0})
    with pytest.raises(KernelBuildError, match="broken on purpose"):
        load(cache)
    assert len(compiled) < 4
    assert list(cache.glob("*.so")) == []


def test_other_sources_flags_or_compilers_are_built_anew(sources, cache, monkeypatch):
    assert load(cache).answer() == 41
    (sources / "tiny.cpp").write_text(TINY % 42)
    assert load(cache).answer() == 42
    (sources / "tiny.h").write_text("// changed\n")
    load(cache)
    load(cache, extra_flags=["-DX"])
    found = compiler.find_compiler()
    monkeypatch.setattr(library, "find_compiler", lambda: compiler.Compiler(path=found.path, version="another"))
    load(cache)
    assert len(list(cache.glob("*.so"))) == 5


@pytest.mark.parametrize("damage", ["truncated", "changed", "empty"])
def test_a_damaged_file_is_built_again(sources, cache, damage):
    load(cache)
    (path,) = cache.glob("*.so")
    whole = path.read_bytes()
    middle = len(whole) // 2
    path.unlink()  # the loaded one stays mapped
    path.write_bytes(
        {
            "truncated": whole[:middle],
            "changed": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
            "empty": b"",
        }[damage]
    )
    assert load(cache).answer() == 41
    assert path.read_bytes() == whole


def test_a_cache_that_cannot_be_written_costs_a_build_only(sources, tmp_path, caplog):
    blocked = tmp_path / "a-file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING):
        assert load(blocked / "cache").answer() == 41
    assert len(caplog.records) == 1
    assert "compiled at every start" in caplog.text


def test_processes_that_start_together_build_once(sources, cache, tmp_path):
    """Two processes, a compiler that takes its time, one translation unit compiled."""
    log, slow = tmp_path / "log", tmp_path / "bin" / "c++"
    slow.parent.mkdir()
    real = compiler.find_compiler().path
    slow.write_text(f'#!/bin/sh\nif [ "$1" != --version ]; then echo run >> {log}; sleep 0.5; fi\nexec {real} "$@"\n')
    slow.chmod(0o755)
    script = f"""
import sys
from pathlib import Path
sys.path[:0] = {json.dumps([str(Path(library.__file__).parents[2])])}
from quire_kernels.cpu import library, variants
library._PACKAGE = Path({str(tmp_path)!r})
library.declare = lambda _: None
print(library.load_library(variants.VARIANTS[-1], cache_dir=Path({str(cache)!r})).answer())
"""
    environment = {**os.environ, "PATH": f"{slow.parent}:{os.environ['PATH']}"}
    processes = [
        subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE) for _ in range(2)
    ]
    assert [process.communicate(timeout=60)[0] for process in processes] == [b"41\n", b"41\n"]
    assert log.read_text().count("run") == 2  # one to compile, one to link


def test_without_a_compiler_the_reference_serves_after_one_warning(sources, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(compiler.shutil, "which", lambda _: None)
    monkeypatch.setattr(library, "default_cache", lambda: tmp_path / "cache")
    with caplog.at_level(logging.WARNING):
        assert select(CPU, torch.bfloat16, kv=KV) is REFERENCE
    (record,) = caplog.records
    assert (
        "slower reference kernels: the cpu kernels are not available: no C++ compiler on the PATH"
        in record.getMessage()
    )
    for asked in ({"choice": "cpu"}, {"quantization": "int8"}):
        with pytest.raises(ValueError, match=r"not available: no C\+\+ compiler"):
            select(CPU, torch.bfloat16, kv=KV, **asked)
    assert len(caplog.records) == 1


def test_a_failing_compiler_is_quoted_and_leaves_nothing(sources, cache):
    (sources / "tiny.cpp").write_text("int broken( {\n")
    with pytest.raises(KernelBuildError, match=r"tiny\.cpp:1"):
        load(cache)
    assert not list(cache.glob("*.so"))
    assert not list(cache.glob(".building-*"))


def test_a_compiler_that_is_too_old_for_the_best_variant_builds_the_next(sources, cache, tmp_path, monkeypatch, caplog):
    old, real = tmp_path / "bin" / "c++", compiler.find_compiler().path
    old.parent.mkdir()
    old.write_text(
        '#!/bin/sh\nfor flag; do if [ "$flag" = -mnew ]; then echo "c++: error: unrecognized option \'-mnew\'" >&2;'
        f' echo more >&2; exit 1; fi; done\nexec {real} "$@"\n'
    )
    old.chmod(0o755)
    monkeypatch.setenv("PATH", f"{old.parent}:{os.environ['PATH']}")
    newest = variants.Variant(name="newest", machines=(), features=frozenset(), flags=("-mnew",))
    monkeypatch.setattr(choice, "usable_variants", lambda: (newest, PORTABLE))
    with caplog.at_level(logging.WARNING):
        assert choice.load_chosen(cache_dir=cache).library.answer() == 41
    (record,) = caplog.records
    expected = (
        f"cannot build the kernels for newest, using slower ones: {old} failed: c++: error: unrecognized option '-mnew'"
    )
    assert record.getMessage() == expected
    with pytest.raises(KernelBuildError, match="unrecognized"):
        library.load_library(newest, cache_dir=cache)
    assert [path.name.split("-")[0] for path in cache.glob("*.so")] == ["portable"]


def test_missing_sources_and_other_systems_are_named(sources, cache, monkeypatch):
    for path in sources.iterdir():
        path.unlink()
    with pytest.raises(KernelBuildError, match="sources are missing"):
        load(cache)
    monkeypatch.setattr(library.platform, "system", lambda: "Darwin")
    with pytest.raises(KernelBuildError, match="not on Darwin"):
        load(cache)


def test_a_prebuilt_library_needs_no_compiler(sources, cache, monkeypatch):
    library.build_prebuilt(PORTABLE)
    monkeypatch.setattr(compiler.shutil, "which", lambda _: None)
    assert load(cache).answer() == 41
    assert not cache.exists()
    (sources / "tiny.cpp").write_text(TINY % 42)  # it was built from something else
    with pytest.raises(KernelBuildError, match="no C\\+\\+ compiler"):
        load(cache)


def test_sources_are_found_in_a_checkout_and_in_an_installation(sources, tmp_path, cache, monkeypatch):
    package = tmp_path / "checkout" / "quire_kernels"
    package.mkdir(parents=True)
    sources.rename(package.parent / "csrc")
    monkeypatch.setattr(library, "_PACKAGE", package)
    assert load(cache).answer() == 41


def test_build_kernels_reports(sources, capsys, monkeypatch):
    assert build.main(["--prebuilt"]) == 0
    assert {Path(line).name.split("-")[0] for line in capsys.readouterr().out.splitlines()} == {
        variant.name for variant in compilable_variants()
    }
    monkeypatch.setattr(compiler.shutil, "which", lambda _: None)
    (sources / "tiny.cpp").write_text(TINY % 42)
    assert build.main(["--prebuilt"]) == 1
    assert "quire build-kernels: no C++ compiler" in capsys.readouterr().err


def test_a_variant_is_usable_only_with_all_its_instructions(monkeypatch):
    best = VARIANTS[0].features
    for machine, have, expected in (
        ("x86_64", best, ["amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "portable"]),
        ("x86_64", best - {"amx_bf16"}, ["avx512_bf16", "avx512_vnni", "avx512", "avx2", "portable"]),
        ("x86_64", best - {"avx512_bf16"}, ["avx512_vnni", "avx512", "avx2", "portable"]),
        ("x86_64", best - {"avx512_vnni"}, ["avx512", "avx2", "portable"]),
        ("x86_64", best - {"avx512vl"}, ["avx2", "portable"]),
        ("x86_64", best - {"avx512vl"} | {"avx_vnni"}, ["avx2_vnni", "avx2", "portable"]),
        ("x86_64", best - {"fma"} | {"avx_vnni"}, ["portable"]),
        ("x86_64", frozenset(), ["portable"]),
        ("aarch64", frozenset({"asimd", "asimddp", "bf16", "i8mm"}), ["neon_bf16", "portable"]),
        ("aarch64", frozenset({"asimd", "asimddp", "i8mm"}), ["portable"]),
        ("riscv64", frozenset(), ["portable"]),
    ):
        monkeypatch.setattr(variants.platform, "machine", lambda machine=machine: machine)
        monkeypatch.setattr(variants, "cpu_features", lambda have=have: have)
        monkeypatch.setattr(variants, "tile_refusal", lambda: None)
        assert [variant.name for variant in usable_variants()] == expected


def test_a_system_that_refuses_the_tile_registers_is_told_of_once(monkeypatch, caplog):
    variants._tell.cache_clear()
    monkeypatch.setattr(variants.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(variants, "cpu_features", lambda: VARIANTS[0].features)
    monkeypatch.setattr(variants, "tile_refusal", lambda: "the kernel refuses the tile registers (for a test)")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert usable_variants()[0].name == "avx512_bf16"
    assert caplog.messages == ["the kernels for amx are not used: the kernel refuses the tile registers (for a test)"]
    with pytest.raises(KernelBuildError, match="the kernels for amx cannot run here: the kernel refuses"):
        library.load_library(VARIANTS[0])


def test_the_tile_registers_are_granted_only_where_the_cpu_has_them():
    """Elsewhere the system says no, which is no error but a reason."""
    reason = variants.tile_refusal.__wrapped__()
    assert reason if "amx_tile" not in variants.cpu_features() else reason != ""


@pytest.mark.parametrize("text", ["flags\t\t: fpu {}\n", "processor\t: 0\nFeatures\t: fp {}\nCPU part\t: 0xd40\n"])
def test_features_are_found_as_each_architecture_lists_them(text, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(text.format("bf16 i8mm"))
    monkeypatch.setattr(variants, "Path", lambda _: tmp_path / "cpuinfo")
    assert variants.cpu_features.__wrapped__() > {"bf16", "i8mm"}


def test_threads_that_the_system_refuses_are_an_error_and_not_a_crash():
    script = f"""
import resource, sys
sys.path[:0] = {json.dumps([str(Path(library.__file__).parents[2])])}
from quire_kernels.cpu.choice import load_chosen
kernels = load_chosen().library
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (64 << 20),) * 2)
print(kernels.quire_create(256, None))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=200)
    assert (result.returncode, result.stdout) == (0, "None\n"), result.stderr


def test_the_kernels_of_another_machine_need_its_compiler(tmp_path: Path) -> None:
    portable = next(each for each in compilable_variants("riscv64") if not each.machines)
    with pytest.raises(KernelBuildError, match="looked for riscv64-linux-gnu-g"):
        library.build_prebuilt(portable, tmp_path, machine="riscv64")
    assert {"neon_bf16", "portable"} == {each.name for each in compilable_variants("aarch64")}
    assert not {each.name for each in compilable_variants("x86_64")} & {"neon_bf16"}


def test_flags_of_prebuilt_kernels_alone_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        build.main(["--machine", "aarch64"])
    assert caught.value.code == 2
    assert "--into and --machine are of --prebuilt" in capsys.readouterr().err
