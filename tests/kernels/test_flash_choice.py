"""The choice of an attention library: which is taken, what is refused with which reason, and a model computed by it."""

from __future__ import annotations

import inspect
import logging
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from quire_engine.demo import demo_model_path
from quire_kernels.flash import flash_attn_2
from quire_kernels.flash.attention import FlashAttention
from quire_kernels.flash.choice import LIBRARIES, with_flash_attention
from quire_kernels.flash.flash_attn_2 import FlashAttn2
from quire_kernels.flash.flash_attn_3 import FlashAttn3
from quire_kernels.flash.part import parts_of
from quire_kernels.flash.torch_varlen import TorchVarlen
from quire_kernels.kernel_set import KernelSet, KVFormat
from quire_kernels.provider import Unavailable
from quire_kernels.reference import REFERENCE
from support import flash_libraries as libraries
from support import flash_standins
from support.flash_libraries import changed, without
from support.flash_signatures import recorded, signature
from support.model_steps import Model, random_ids, scheduled
from support.paged_batches import LAYER, paged_batch, shape_of

CPU = torch.device("cpu")  # where the stand-ins compute
HOPPER, AMPERE, BLACKWELL = (9, 0), (8, 0), (12, 0)
SMALL, LARGE = KVFormat(head_dim=64, block_size=16), KVFormat(head_dim=64, block_size=256)


@pytest.fixture(autouse=True)
def _no_library(monkeypatch):
    """Whatever is installed here; None in `sys.modules` is what cannot be found."""
    for name in ("flash_attn", "flash_attn_interface", "fa3_fwd_interface"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture
def install(monkeypatch):
    def installed(name: str, **functions: object) -> None:
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)

    return installed


def install_2(install) -> None:
    functions = {each.__name__: each for each in (libraries.varlen_of_2(), libraries.with_kvcache_of_2())}
    install("flash_attn", __version__="2.8.3", **functions)


def install_3(install) -> None:
    install("flash_attn_interface", flash_attn_with_kvcache=libraries.with_kvcache_of_3())


def taken(kv: KVFormat = LARGE, capability: tuple[int, int] = HOPPER, **options: object) -> KernelSet:
    return with_flash_attention(
        replace(REFERENCE, name="triton", bounded_attention=True),
        **{"device": CPU, "dtype": torch.bfloat16, "kv": kv, "capability": capability, **options},
    )


def refusal(*arguments, **options) -> str:
    with pytest.raises(Unavailable) as caught:
        taken(*arguments, **options)
    return str(caught.value)


def test_the_set_is_the_same_but_for_attention(install, caplog):
    install_2(install)
    with caplog.at_level(logging.INFO):
        found = taken()
    assert found.name == "triton+flash-attn 2"
    assert found.attention != REFERENCE.attention
    assert not found.bounded_attention, "what it calls follows from the lengths"
    assert replace(found, name="reference", attention=REFERENCE.attention) == REFERENCE
    assert caplog.messages == ["attention is computed by flash-attn 2 (version 2.8.3)"]


def test_each_is_taken_where_it_can_serve(install):
    install_2(install)
    install_3(install)
    install("fa3_fwd_interface", flash_attn_varlen_func=libraries.varlen_of_3_fwd())
    assert taken(LARGE, HOPPER).name == "triton+fa3-fwd"
    assert taken(SMALL, HOPPER).name == "triton+flash-attn 3"
    install("fa3_fwd_interface")
    assert taken(LARGE, HOPPER).name == "triton+flash-attn 2"
    assert taken(LARGE, AMPERE).name == "triton+flash-attn 2"
    assert taken(LARGE, BLACKWELL).name == "triton+flash-attn 2"


def test_torchs_is_the_last(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(varlen, "varlen_attn", libraries.varlen_of_torch())
    assert taken(LARGE, AMPERE).name == "triton+torch's varlen_attn"


def test_a_refusal_names_every_library_and_what_would_work():
    said = refusal(SMALL, AMPERE)
    assert said == (
        "cannot take attention from flash-attn: "
        "flash-attn 3 needs a GPU of compute capability 9.0, this one has 8.0; "
        "fa3-fwd needs a GPU of compute capability 9.0, this one has 8.0; "
        "flash-attn 2 takes blocks of a multiple of 256 tokens, not 16 (set block_size to 256); "
        "torch's varlen_attn takes blocks of a multiple of 256 tokens, not 16 (set block_size to 256) "
        "(or set attention to auto)"
    )


@pytest.mark.parametrize(
    ("kv", "capability", "options", "said"),
    [
        (LARGE, HOPPER, {"deterministic": True}, "its results depend on what else is computed (leave deterministic"),
        (replace(LARGE, kv_type="fp8"), HOPPER, {}, "not in fp8 (set kv_cache_dtype to auto)"),
        (LARGE, HOPPER, {"dtype": torch.float32}, "not in float32 (set dtype to bfloat16)"),
        (LARGE, (7, 5), {}, "flash-attn 2 needs a GPU of compute capability 8.0, this one has 7.5"),
        (replace(LARGE, head_dim=264), HOPPER, {}, "flash-attn 2 takes heads whose width is a multiple of 8 up to 256"),
        (replace(SMALL, head_dim=20), HOPPER, {}, "flash-attn 3 takes heads whose width"),
        (LARGE, HOPPER, {}, "flash-attn 3 takes blocks of less than 64 tokens, not 256"),
        (SMALL, HOPPER, {}, "flash-attn 3 is not installed (it is built from"),
        (SMALL, HOPPER, {}, "fa3-fwd is not installed (pip install fa3-fwd)"),
        (LARGE, HOPPER, {}, "flash-attn 2 is not installed (pip install --no-build-isolation 'quire[flash]')"),
    ],
)
def test_what_cannot_be_served_is_refused(kv, capability, options, said):
    assert said in refusal(kv, capability, **options)


def test_a_torch_without_flash_attention_says_so(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert "torch's varlen_attn is not available: this torch was built without flash" in refusal(LARGE, AMPERE)


def test_the_varlen_attn_of_torch_2_11_takes_no_blocks():
    with pytest.raises(Unavailable, match="varlen_attn takes no block_table, enable_gqa, num_splits, seqused_k"):
        libraries.load_torch("2.11.0")


@pytest.mark.parametrize("library", [FlashAttn2(), FlashAttn3()])
def test_a_library_that_cannot_be_loaded_says_why(library, install, monkeypatch):
    name = "flash_attn" if isinstance(library, FlashAttn2) else "flash_attn_interface"
    install(name)  # as flash-attn 4 alone does it: a package without the functions
    with pytest.raises(Unavailable, match=r"cannot be loaded: .*has no attribute 'flash_attn_"):
        library.load()

    class Broken:
        """A module of another torch: its symbols are found when it is imported."""

        def find_spec(self, fullname, path=None, target=None):
            if fullname == name:
                raise ImportError("undefined symbol: _ZN3c10")

    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(Unavailable, match="cannot be loaded: undefined symbol"):
        library.load()


def test_a_library_of_an_unknown_version_is_refused(install):
    def flash_attn_varlen_func(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal): ...

    install(
        "flash_attn",
        flash_attn_varlen_func=flash_attn_varlen_func,
        flash_attn_with_kvcache=libraries.with_kvcache_of_2(),
    )
    assert (
        "flash-attn 2 is of a version without what is needed: flash_attn_varlen_func takes no block_table" in refusal()
    )


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (without("block_table"), "flash-attn 2 fails here: keys that are not in pages are not modelled"),
        (
            changed("window_size", lambda _: (-1, -1)),
            "flash-attn 2 computes something else here where there is a window;",
        ),
        (changed("q", lambda q: q * 2), "flash-attn 2 computes something else here;"),
    ],
)
def test_a_build_that_computes_something_else_is_not_taken(install, fault, said):
    """As one without pages, windows or the GPU's code would; the other functions are found by their own trial."""
    for broken in (0, 1):
        functions = [libraries.varlen_of_2(), libraries.with_kvcache_of_2()]
        names = [each.__name__ for each in functions]
        functions[broken] = libraries.faulty(functions[broken], fault)
        install("flash_attn", **dict(zip(names, functions, strict=True)))
        assert said in refusal()


def test_a_library_that_reads_unused_slots_is_not_taken(monkeypatch, install):
    """Which flash-attn 3 does where its tiles are pages: were they smaller than they are known to be, it showed."""
    install_3(install)
    monkeypatch.setattr(flash_standins, "LEAST_TILE", 16)
    assert "flash-attn 3 computes something else here;" in refusal(SMALL)


def test_libraries_have_names_of_their_own():
    assert len({library.name for library in LIBRARIES}) == len(LIBRARIES) == 4


def test_a_wheel_without_fp16_is_not_taken_for_it(install):
    install("fa3_fwd_interface", flash_attn_varlen_func=libraries.varlen_of_3_fwd())
    assert taken(SMALL).name == "triton+fa3-fwd"
    said = refusal(SMALL, dtype=torch.float16)
    assert "fa3-fwd fails here: This flash attention build does not support FP16.;" in said


def test_a_wheel_for_another_cuda_says_so(monkeypatch, install):
    class Broken(ModuleType):
        def __getattr__(self, name):
            raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", Broken("fa3_fwd_interface"))
    assert "fa3-fwd cannot be loaded: libcudart.so.13: cannot open shared object file;" in refusal(SMALL)


def test_a_version_that_splits_contexts_unasked_is_told_not_to():
    plain = libraries.varlen_of_2()
    splits = inspect.Parameter("num_splits", inspect.Parameter.KEYWORD_ONLY, default=0)
    taken_by = inspect.signature(plain)
    told = []

    def newer(num_splits: int = 0, **arguments: object) -> torch.Tensor:
        told.append(num_splits)
        return plain(**arguments)

    newer.__signature__ = taken_by.replace(parameters=[*taken_by.parameters.values(), splits])
    batch = paged_batch([(9, 9)], shape_of(2, 1, 64), page=256)
    ops = FlashAttention(flash_attn_2.loaded(newer, libraries.with_kvcache_of_2(), version=""), REFERENCE.attention)
    ops.attention(batch.q, batch.shape, batch.kv, LAYER, batch.step)
    assert told == [1]


def test_the_installed_torch_is_the_recorded_one():
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="this torch has no varlen_attn")
    version = torch.__version__.partition("+")[0]
    entries = [each for each in recorded() if (each["package"], each["version"]) == ("torch", version)]
    if not entries:
        pytest.skip(f"torch {version} is not recorded")
    real = inspect.signature(varlen.varlen_attn).parameters.values()
    assert [(each.name, each.kind, each.default) for each in real] == [
        (each.name, each.kind, each.default) for each in signature(entries[0]).parameters.values()
    ]


def test_the_installed_torch_takes_what_it_is_given(monkeypatch):
    """Its own checks and its operator's schema, on tensors without memory."""
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    library = TorchVarlen()
    try:
        loaded = library.load()
    except Unavailable as error:
        pytest.skip(str(error))
    for window in (None, 30):
        batch = paged_batch([(300, 1), (20, 20), (9, 2)], shape_of(4, 2, 64, window), page=256)
        keys, values = (batch.kv[:, LAYER, half].transpose(1, 2).to("meta") for half in (0, 1))
        for part in parts_of(batch.step, decodes_apart=True):
            fields = ("query_starts", "context_lens", "context_starts", "block_tables")
            weightless = replace(part, **{name: getattr(part, name).to("meta") for name in fields})
            q = torch.empty(part.num_rows, 4, 64, dtype=torch.bfloat16, device="meta")
            assert loaded.attend(q, keys, values, batch.shape, weightless).shape == q.shape


@pytest.mark.parametrize("library", ["flash-attn 2", "flash-attn 3", "fa3-fwd"])
def test_a_model_computes_the_same_with_it(install, library):
    """The embedded model, its prompts in chunks beside decode rows."""
    if library == "fa3-fwd":
        install("fa3_fwd_interface", flash_attn_varlen_func=libraries.varlen_of_3_fwd())
    else:
        (install_2 if library == "flash-attn 2" else install_3)(install)
    page = 256 if library == "flash-attn 2" else 16
    kernels = with_flash_attention(
        REFERENCE, device=CPU, dtype=torch.bfloat16, kv=KVFormat(head_dim=64, block_size=page), capability=HOPPER
    )
    assert kernels.name == f"reference+{library}"
    prompts = [random_ids(length, seed=length, vocab_size=500) for length in (300, 40, 7)]
    found, wanted = (logits_in_chunks(each, prompts, page) for each in (kernels, REFERENCE))
    assert torch.allclose(found, wanted, atol=0.15, rtol=0.05)
    assert (found.argmax(-1) == wanted.argmax(-1)).float().mean() > 0.9


def logits_in_chunks(kernels: KernelSet, prompts: list[list[int]], page: int) -> torch.Tensor:
    """Of all rows: first the whole of the last prompt and most of the others, then a row, a chunk, a row."""
    model = Model(
        demo_model_path(), dtype=torch.bfloat16, block_size=page, num_blocks=60, kernels=kernels, max_model_len=512
    )
    blocks = model.blocks()
    tables = [blocks.take(len(prompt)) for prompt in prompts]
    cuts = [len(prompts[0]) - 1, len(prompts[1]) - 11, len(prompts[2]) - 1]
    items = list(zip(prompts, tables, cuts, strict=True))
    first = model.step(*(scheduled(ids, table, 0, cut) for ids, table, cut in items))
    second = model.step(*(scheduled(ids, table, cut, len(ids) - cut) for ids, table, cut in items))
    return torch.cat([*first, *second])
