"""What C++ and Python agree on, what the C++ files agree on among themselves, and that none draws a warning."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from ctypes import c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Literal

import pytest

from quire_kernels.cpu import compiler, library, linear, signatures
from quire_kernels.cpu.compiler import CompilationError, KernelBuildError
from quire_kernels.cpu.ops import cpu_kernel_set
from quire_kernels.cpu.variants import compilable_variants, usable_variants

SOURCES = library._source_folder()
STRICT = ("-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Wmissing-declarations", "-Werror", "-fsyntax-only")
COMPILERS = [name for name in ("g++", "clang++") if shutil.which(name)]
SETS = compilable_variants()
# Compiling the files for one set takes 17 s. Of all lines that any set compiles, these have six that no other one has:
# their names, and two of the sums by AVX-VNNI.
WITHIN_OTHERS = {"avx512_bf16", "avx512_vnni", "avx2_vnni"}
VALUES = {"void": None, "float": c_float, "double": c_double, "int32_t": c_int32, "int64_t": c_int64}
VALUES["Epilogue"] = VALUES["Fetch"] = c_int32
VALUES["GatherColumns"] = c_void_p  # a function


def as_ctypes(declared: str) -> type | None:
    """`const bf16* rows` or `int64_t m`; characters as a result are a name."""
    if "*" in declared:
        return c_char_p if declared == "const char*" else c_void_p
    return VALUES[declared.split(maxsplit=1)[0]]


def test_signatures_are_those_of_the_header():
    text = re.sub(r"//.*", "", (SOURCES / "ops.h").read_text())
    declared = re.findall(r"QUIRE_API ([\w ]+\*?) (quire_\w+)\(([^)]*)\);", text)
    assert [name for _, name, _ in declared] == list(signatures.SIGNATURES)
    for result, name, arguments in declared:
        found_result, found_arguments = signatures.SIGNATURES[name]
        assert found_arguments == tuple(as_ctypes(each.strip()) for each in arguments.split(",") if each), name
        if name != "quire_layouts":  # its result is a pointer that Python looks behind
            assert found_result is as_ctypes(result), name


def test_every_op_is_defined_with_what_it_is_declared_by():
    """A definition without the mark or the header would be a function of its own."""
    declared = set(re.findall(r"QUIRE_API .*?\b(quire_\w+)\(", (SOURCES / "ops.h").read_text()))
    defining = {path: path.read_text() for path in SOURCES.rglob("*.cpp") if "QUIRE_API" in path.read_text()}
    assert all('#include "ops.h"' in text for text in defining.values())
    defined = [name for text in defining.values() for name in re.findall(r"QUIRE_API .*?\b(quire_\w+)\(", text)]
    assert sorted(defined) == sorted(declared)


class Longer(ctypes.Structure):
    _fields_ = (*signatures.StepArgs._fields_, ("more", c_int64))


class Exchanged(ctypes.Structure):
    _fields_ = (*reversed(signatures.StepArgs._fields_[:2]), *signatures.StepArgs._fields_[2:])


@pytest.mark.parametrize("wrong", [Longer, Exchanged])
def test_a_structure_that_python_sees_otherwise_is_refused(wrong, monkeypatch):
    library.load_library(usable_variants()[0])
    monkeypatch.setitem(signatures.STRUCTURES, "AttentionStep", wrong)
    with pytest.raises(KernelBuildError, match="cannot be loaded: struct AttentionStep is"):
        library.load_library(usable_variants()[0])


def test_a_structure_that_one_side_lacks_is_refused(monkeypatch):
    monkeypatch.delitem(signatures.STRUCTURES, "KvPool")
    with pytest.raises(KernelBuildError, match=r"struct KvPool is .* in C\+\+ and None in Python"):
        library.load_library(usable_variants()[0])


def test_activations_of_other_names_than_the_compiled_ones_are_refused(monkeypatch):
    monkeypatch.setattr(linear, "Activation", Literal["silu", "gelu_tanh", "nap"])
    with pytest.raises(ValueError, match=r"the activations are .*swiglu_clamped.* in C\+\+ and .*nap.* in Python"):
        cpu_kernel_set(1, None, library=library.load_library(usable_variants()[0]))


@pytest.fixture
def changed(tmp_path):
    """Replaces a text in a copy of the sources; returns the copy."""

    def change(name: str, old: str, new: str) -> Path:
        folder = shutil.copytree(SOURCES, tmp_path / "csrc")
        text = (folder / name).read_text()
        assert text.count(old) == 1
        (folder / name).write_text(text.replace(old, new))
        return folder

    return change


@pytest.mark.parametrize(
    ("old", "new"),
    [("int32_t units;", "int64_t units;"), ("int64_t num_blocks, num_layers,", "int64_t num_layers, num_blocks,")],
)
def test_a_structure_that_changes_in_cpp_is_refused(old, new, changed, tmp_path):
    folder = changed("attention/attention.h", old, new)
    flags = (*compiler.FLAGS, "-O0", f"-I{folder}")
    path = tmp_path / "layouts.so"
    compiler.compile_library(compiler.find_compiler(), [folder / "runtime" / "layouts.cpp"], flags, path, jobs=1)
    compiled = ctypes.CDLL(str(path))
    compiled.quire_layouts.restype = signatures.SIGNATURES["quire_layouts"][0]
    with pytest.raises(ValueError, match="struct KvPool"):
        signatures.compare_structures(compiled)


@pytest.mark.parametrize("unit", ["runtime/layers.cpp", "attention/attention.cpp"])
def test_a_changed_argument_compiles_neither_where_it_is_called_nor_where_it_is_defined(unit, changed):
    old = "AttentionStep* step, const bf16* q, bf16* out);"
    folder = changed("ops.h", old, old.replace("bf16* out", "float* out"))
    found = compiler.find_compiler()
    with pytest.raises(CompilationError, match=r"quire_attention|float\*"):
        compiler._run([found.path, *compiler.FLAGS, "-fsyntax-only", f"-I{folder}", str(folder / unit)], 300)


@pytest.mark.parametrize("name", COMPILERS)
@pytest.mark.parametrize(
    "variant",
    [pytest.param(x, id=x.name, marks=pytest.mark.matrix if x.name in WITHIN_OTHERS else ()) for x in SETS],
)
def test_no_file_draws_a_warning(name, variant):
    """Here warnings are errors; where the kernels are built, an unknown compiler may warn of whatever it likes."""
    if not accepts(name, variant.flags):
        pytest.skip(f"{name} does not know {variant.name}")
    units = [*SOURCES.rglob("*.cpp"), Path(__file__).with_name("pool_stress.cpp")]
    command = [name, *compiler.FLAGS, *variant.flags, *STRICT, f"-I{SOURCES}", *map(str, sorted(units))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr[:4000]


def accepts(name: str, flags: tuple[str, ...]) -> bool:
    command = [name, *flags, "-fsyntax-only", "-x", "c++", "/dev/null"]
    return subprocess.run(command, capture_output=True, check=False, timeout=60).returncode == 0
