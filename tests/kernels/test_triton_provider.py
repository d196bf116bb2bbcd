"""What the Triton kernels say of themselves, and why they are not there, on a machine without a GPU too."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from quire_kernels.kernel_set import KVFormat
from quire_kernels.optional_paths import (
    DECODE_CHAIN,
    DEPENDENT_LAUNCH,
    FUSED_GATE_UP,
    GRAPHS,
    NAMES,
    STORED_PRODUCTS,
    UNMASKED_PROMPTS,
)
from quire_kernels.provider import Requirements, Unavailable
from quire_kernels.reference import REFERENCE
from quire_kernels.select import select
from quire_kernels.triton import provider
from quire_kernels.triton.provider import TritonProvider, explained

CUDA = torch.device("cuda")
KV = KVFormat(head_dim=64, block_size=16)
REQUIRED = Requirements(device=CUDA, dtype=torch.bfloat16, kv=KV)

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton for this system")


@pytest.fixture
def gpu(monkeypatch):
    """Says that there is a GPU of some capability on which a kernel runs."""

    def of(*capability: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(provider, "_run_a_kernel", lambda _: None)

    return of


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kv", [KV, replace(KV, kv_type="fp8"), replace(KV, head_dim=512, block_size=128)])
def test_there_is_nothing_against_what_the_kernels_are_made_for(dtype, kv):
    assert TritonProvider().why_not(replace(REQUIRED, dtype=dtype, kv=kv)) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": torch.float32}, "bfloat16 or float16, not in float32 (set dtype to bfloat16)"),
        ({"kv": replace(KV, kv_type="int8")}, "or in fp8, not in int8 (set kv_cache_dtype to fp8)"),
        ({"kv": replace(KV, head_dim=520)}, "head_dim 520 is not a multiple of 8 from 16 to 512"),
        ({"kv": replace(KV, head_dim=72, kv_type="fp8")}, "not a multiple of 16 from 16 to 512 (set kv_cache_dtype to"),
        ({"kv": replace(KV, block_size=6, kv_type="fp8")}, "block_size 6 is not a multiple of 4 (set kv_cache_dtype"),
    ],
)
def test_what_they_cannot_serve_is_refused_with_what_would_work(changes, said):
    reason = TritonProvider().why_not(replace(REQUIRED, **changes))
    assert reason is not None
    assert said in reason
    assert reason.endswith(")") == ("head_dim=520" not in str(changes))


def test_without_triton_or_with_an_old_one_the_needed_version_is_named(monkeypatch):
    with monkeypatch.context() as absent:
        absent.setattr(importlib.util, "find_spec", lambda _: None)
        assert "need Triton 3.6 or newer, which is not installed" in str(TritonProvider().why_not(REQUIRED))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    for version, served in (("3.5.1", False), ("3.6.0", True), ("3.10.0+git0", True), ("4.0", True)):
        monkeypatch.setattr(importlib.metadata, "version", lambda _, version=version: version)
        reason = TritonProvider().why_not(REQUIRED)
        assert reason is None if served else reason.startswith(f"need Triton 3.6 or newer, not {version}")


def test_torch_for_other_gpus_is_refused(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "made for NVIDIA GPUs" in str(TritonProvider().why_not(REQUIRED))


@needs_triton
@pytest.mark.parametrize(
    ("capability", "warp_groups"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 3), True), ((12, 0), False)]
)
def test_the_set_is_made_for_the_gpus_instructions(capability, warp_groups, gpu, monkeypatch):
    from quire_kernels.triton import set as triton_set

    made = {}
    monkeypatch.setattr(triton_set, "make_triton_set", lambda **options: made.update(options) or REFERENCE)
    gpu(*capability)
    TritonProvider().make(replace(REQUIRED, kv=replace(KV, kv_type="fp8")))
    ahead = capability >= (9, 0)
    told = {"warp_groups": warp_groups, "ahead": ahead, "left_out": ()}
    assert made == {"kv_type": "fp8", "quantization": None, "deterministic": False, "chained": ahead, **told}
    TritonProvider().make(replace(REQUIRED, deterministic=True, quantization="int4"))
    assert made == {"kv_type": "auto", "quantization": "int4", "deterministic": True, "chained": False, **told}


@needs_triton
def test_what_is_left_out_is_not_taken():
    from quire_kernels.triton.set import make_triton_set

    newer = {"chained": True, "ahead": True}
    whole, plain = make_triton_set(**newer), make_triton_set(**newer, left_out=NAMES)
    assert whole.optional == plain.optional
    assert whole.optional == (STORED_PRODUCTS, UNMASKED_PROMPTS, DECODE_CHAIN, DEPENDENT_LAUNCH, GRAPHS)
    assert make_triton_set(deterministic=True).optional == (STORED_PRODUCTS, FUSED_GATE_UP, GRAPHS)
    assert make_triton_set(quantization="int8", **newer).optional == (UNMASKED_PROMPTS, GRAPHS)
    assert whole.bind_decodes.keywords == {"ahead": True}
    assert make_triton_set(**newer, left_out=[DEPENDENT_LAUNCH]).bind_decodes.keywords == {"ahead": False}
    assert (whole.graphs, plain.graphs) == (True, False)
    assert (plain.pack_stored, plain.stored_bits, plain.bind_decodes) == (None, None, None)


@needs_triton
def test_auto_takes_them_on_a_gpu(gpu, caplog):
    gpu(9, 0)
    assert select(CUDA, torch.bfloat16, kv=KV).name == "triton"
    assert select(CUDA, torch.float16, "triton", kv=KV).name == "triton"
    assert not caplog.records
    assert select(CUDA, torch.float32, kv=KV) is REFERENCE
    assert "slower reference kernels: the triton kernels compute in bfloat16 or float16" in caplog.text


@needs_triton
def test_an_older_gpu_is_the_references(gpu, caplog):
    gpu(7, 5)
    assert select(CUDA, torch.bfloat16, kv=KV) is REFERENCE
    assert "need a GPU of compute capability 8.0 or newer, this one has 7.5" in caplog.text
    with pytest.raises(ValueError, match=r"this one has 7\.5; set kernels to auto"):
        select(CUDA, torch.bfloat16, "triton", kv=KV)
    with pytest.raises(ValueError, match=r"this one has 7\.5; the reference kernels hold"):
        select(CUDA, torch.bfloat16, kv=replace(KV, kv_type="fp8"))


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_where_no_kernel_runs_the_reason_is_torchs_or_tritons_own(monkeypatch):
    with pytest.raises(Unavailable, match=r"are not available: .*(NVIDIA|CUDA)"):
        TritonProvider().make(REQUIRED)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    # On the CPU, where a tensor can be made but no kernel launched.
    with pytest.raises(Unavailable, match=r"are not available: .*driver"):
        TritonProvider().make(replace(REQUIRED, device=torch.device("cpu")))


@needs_triton
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Triton's launchers are built on Linux")
def test_what_triton_says_of_a_missing_compiler_is_understood(tmp_path):
    """Triton's own builder, in a process that finds no compiler, and in one whose compiler fails."""
    code = (
        "from triton.runtime.build import compile_module_from_src\n"
        "from quire_kernels.triton.provider import explained\n"
        "try:\n    compile_module_from_src('int broken(', 'broken')\n"
        "except Exception as error:\n    print(explained(error))\n"
    )
    paths = {"PYTHONPATH": ":".join(path for path in sys.path if path), "TRITON_CACHE_DIR": str(tmp_path)}

    def said(**environment: str) -> str:
        command = [sys.executable, "-c", code]
        run = subprocess.run(command, env=paths | environment, capture_output=True, text=True, timeout=100, check=True)
        return run.stdout.strip()

    assert said(PATH="") == "Triton finds no C compiler for what launches its kernels (install gcc, or set CC)"
    assert "/false c" in said(PATH="/usr/bin:/bin", CC="/bin/false")


def test_errors_are_told_in_one_line_with_the_remedy():
    assert explained(RuntimeError("no kernel image\nCUDA_LAUNCH_BLOCKING=1")) == "no kernel image"
    assert explained(ValueError()) == "ValueError"
    assert "(set TRITON_CACHE_DIR to a folder that can be written)" in explained(PermissionError(13, "denied", "/x"))
    assert "TRITON_CACHE_DIR" not in explained(FileNotFoundError(2, "gone", "/x"))
