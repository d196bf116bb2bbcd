"""The adapters of attention libraries against functions with the libraries' published signatures and rules."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire_kernels.flash import fa3_fwd, flash_attn_2, flash_attn_3, torch_varlen
from quire_kernels.flash.attention import FlashAttention
from quire_kernels.flash.flash_attn_3 import FlashAttn3
from quire_kernels.flash.library import Loaded
from quire_kernels.flash.part import parts_of
from quire_kernels.kernel_set import KVFormat
from quire_kernels.reference import REFERENCE
from support import flash_libraries as libraries
from support.flash_libraries import added, changed, exchanged, faulty, without
from support.paged_batches import LAYER, PagedBatch, paged_batch, shape_of

TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3}
# A library with the pages it is used with.
LIBRARIES = {
    "flash-attn 2": (libraries.load_2, 256),
    "flash-attn 2, large pages": (libraries.load_2, 512),
    "flash-attn 3": (libraries.load_3, 16),
    "flash-attn 3, pages of 32": (libraries.load_3, 32),
    "torch": (libraries.load_torch, 256),
    "fa3-fwd": (libraries.load_3_fwd, 16),
}
# (tokens present after the step, rows of them in the step) of each sequence.
BATCHES = {
    "prefill": [(300, 300), (5, 5)],
    "chunks": [(300, 200), (515, 3), (257, 2)],
    "decode": [(300, 1), (1, 1), (256, 1), (257, 1), (600, 1)],
    "mixed": [(300, 1), (257, 1), (20, 20), (515, 3)],
    "elder first": [(40, 40), (300, 1), (2, 1), (515, 3)],
    "decodes apart": [(300, 1), (5, 5), (7, 1), (513, 1), (90, 4), (258, 1)],
    "one token": [(1, 1)],
}
SHAPES = [(16, 1, 64, 100), (1, 1, 128, None), (3, 3, 80, 7), (2, 1, 256, 1), (4, 1, 96, 300), (6, 2, 192, None)]


def attend(loaded: Loaded, batch: PagedBatch) -> torch.Tensor:
    return FlashAttention(loaded, REFERENCE.attention).attention(batch.q, batch.shape, batch.kv, LAYER, batch.step)


def is_close(found: torch.Tensor, batch: PagedBatch) -> bool:
    most = TOLERANCE[batch.q.dtype]
    return torch.allclose(found.float(), batch.expected(), rtol=most, atol=most / 4)  # NaN is close to nothing


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("slices", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize(("load", "page"), LIBRARIES.values(), ids=LIBRARIES)
def test_results_are_the_references(load, page, slices, window):
    batch = paged_batch(slices, shape_of(4, 2, 64, window), page=page)
    found = attend(load(), batch)
    assert (found.shape, found.dtype) == ((len(batch.q), 4 * 64), torch.bfloat16)
    assert is_close(found, batch)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("load", "page"), LIBRARIES.values(), ids=LIBRARIES)
def test_heads_of_any_number_and_width(load, page, shape):
    batch = paged_batch(BATCHES["mixed"], shape_of(*shape), page=page)
    assert is_close(attend(load(), batch), batch)


@pytest.mark.parametrize(("load", "page"), LIBRARIES.values(), ids=LIBRARIES)
def test_float16_too(load, page):
    if load is libraries.load_3_fwd:
        pytest.skip("it is compiled without")
    batch = paged_batch(BATCHES["mixed"], shape_of(4, 2, 64), page=page, dtype=torch.float16)
    assert is_close(attend(load(), batch), batch)


@pytest.mark.parametrize("version", ["2.7.4.post1", "2.8.3", "2.8.3.post2"])
@pytest.mark.parametrize("load", [libraries.load_2, libraries.load_3])
def test_every_recorded_version_of_flash_attn(load, version):
    batch = paged_batch(BATCHES["mixed"], shape_of(4, 2, 64, 90), page=256 if load is libraries.load_2 else 16)
    assert is_close(attend(load(version), batch), batch)


def test_the_first_torch_that_takes_blocks():
    batch = paged_batch(BATCHES["mixed"], shape_of(4, 2, 64, 90), page=256)
    assert is_close(attend(libraries.load_torch("2.12.0"), batch), batch)


@pytest.mark.parametrize("unsampled", [(0, 1), (1, 2), (3,)])
@pytest.mark.parametrize(("load", "page"), LIBRARIES.values(), ids=LIBRARIES)
def test_rows_of_the_last_layer_leave_sequences_without_any(load, page, unsampled):
    """There one row at most is left of each sequence, which the libraries take for exactly one."""
    batch = paged_batch(BATCHES["mixed"], shape_of(4, 2, 64), page=page, unsampled=unsampled)
    assert batch.step.sampled is not None
    assert batch.step.sampled.max_query_len == 1
    last = replace(batch, step=batch.step.sampled, q=batch.q[batch.step.sample_rows])
    assert is_close(attend(load(), last), last)


@pytest.mark.parametrize(("load", "page"), LIBRARIES.values(), ids=LIBRARIES)
def test_no_row_at_all(load, page):
    batch = paged_batch([(20, 5), (9, 9)], shape_of(4, 2, 64), page=page, unsampled=(0, 1))
    assert batch.step.sampled is not None
    none = replace(batch, step=batch.step.sampled, q=batch.q[:0])
    assert parts_of(none.step, decodes_apart=True) == ()  # no library is called
    assert attend(load(), none).shape == (0, 4 * 64)


def test_parts_of_a_step():
    step = paged_batch(BATCHES["decodes apart"], shape_of(1, 1, 64), page=256).step
    parts = parts_of(step, decodes_apart=True)
    assert [(part.first_row, part.num_rows, part.decodes) for part in parts] == [
        (0, 6, False),
        (6, 2, True),
        (8, 5, False),
    ]
    assert [part.query_starts.tolist() for part in parts] == [[0, 1, 6], [0, 1, 2], [0, 4, 5]]
    assert [part.context_starts.tolist() for part in parts] == [[0, 300, 305], [0, 7, 520], [0, 90, 348]]
    assert [part.max_rows for part in parts] == [5, 1, 4]
    (whole,) = parts_of(step, decodes_apart=False)
    unsampled = paged_batch(BATCHES["decodes apart"], shape_of(1, 1, 64), page=256, unsampled=(2, 3, 4, 5)).step.sampled
    (first,) = parts_of(unsampled, decodes_apart=True)  # and nothing for those that follow without a row
    assert (first.num_rows, first.decodes) == (2, True)
    assert torch.equal(whole.query_starts, step.query_starts)
    assert all(starts.dtype == torch.int32 for part in parts for starts in (part.query_starts, part.context_starts))


def test_the_pool_is_not_copied():
    seen = []

    def looked_at(arguments):
        seen.append(arguments)
        return arguments

    varlen, with_kvcache = (faulty(f, looked_at) for f in (libraries.varlen_of_2(), libraries.with_kvcache_of_2()))
    batch = paged_batch(BATCHES["mixed"], shape_of(4, 2, 64), page=256)
    attend(flash_attn_2.loaded(varlen, with_kvcache, version=""), batch)
    assert len(seen) == 2
    for arguments in seen:
        for half, names in enumerate((("k", "k_cache"), ("v", "v_cache"))):
            (tensor,) = (arguments[name] for name in names if name in arguments)
            assert tensor.data_ptr() == batch.kv[0, LAYER, half].data_ptr()
            assert tensor.shape == (len(batch.kv), 256, 2, 64)


@pytest.mark.parametrize(
    "fault",
    [
        exchanged("max_seqlen_q", "max_seqlen_k"),
        exchanged("k", "v"),
        exchanged("cu_seqlens_q", "cu_seqlens_k"),
        without("block_table"),
        without("cu_seqlens_k"),
        without("window_size"),
        without("softmax_scale"),
        changed("window_size", lambda window: (window[0] + 1, 0)),
        changed("window_size", lambda window: (window[0] - 1, 0)),
        changed("max_seqlen_q", lambda most: most - 1),
        changed("max_seqlen_k", lambda most: most - 1),
        changed("cu_seqlens_q", lambda starts: starts.long()),
        changed("cu_seqlens_k", lambda starts: starts + torch.arange(len(starts), dtype=torch.int32)),
        changed("block_table", lambda table: table.long()),
        changed("block_table", lambda table: table.flip(0)),
        changed("k", lambda k: k.transpose(1, 2)),
        added("seqused_k", None),
        added("page_table", None),
    ],
)
def test_a_wrong_argument_of_flash_attn_2_packed_is_found(fault):
    batch = paged_batch(BATCHES["chunks"], shape_of(4, 2, 64, 50), page=256)
    loaded = flash_attn_2.loaded(faulty(libraries.varlen_of_2(), fault), libraries.with_kvcache_of_2(), version="")
    assert fails(loaded, batch)


def test_a_mask_that_is_not_causal_is_found():
    """With a window its right side says it too."""
    batch, small = (paged_batch(BATCHES["chunks"], shape_of(4, 2, 64), page=page) for page in (256, 16))
    varlen, with_kvcache = libraries.varlen_of_2(), libraries.with_kvcache_of_2()
    assert fails(flash_attn_2.loaded(faulty(varlen, without("causal")), with_kvcache, version=""), batch)
    assert fails(flash_attn_3.loaded(faulty(libraries.with_kvcache_of_3(), without("causal")), version=""), small)
    opened = changed("window_size", lambda _: (-1, -1))
    assert fails(torch_varlen.loaded(faulty(libraries.varlen_of_torch(), opened), version=""), batch)


@pytest.mark.parametrize(
    "fault",
    [
        without("cache_seqlens"),
        without("block_table"),
        without("window_size"),
        without("softmax_scale"),
        exchanged("k_cache", "v_cache"),
        changed("cache_seqlens", lambda lengths: lengths - 1),
        changed("cache_seqlens", lambda lengths: lengths + 1),
        changed("cache_seqlens", lambda lengths: lengths.long()),
        changed("window_size", lambda window: (window[0] + 1, 0)),
        changed("q", lambda q: q.squeeze(1)),
        added("cu_seqlens_q", None),
    ],
)
def test_a_wrong_argument_of_flash_attn_2_with_a_cache_is_found(fault):
    batch = paged_batch(BATCHES["decode"], shape_of(4, 2, 64, 50), page=256)
    loaded = flash_attn_2.loaded(libraries.varlen_of_2(), faulty(libraries.with_kvcache_of_2(), fault), version="")
    assert fails(loaded, batch)


@pytest.mark.parametrize(
    "fault",
    [
        without("cache_seqlens"),
        without("page_table"),
        without("max_seqlen_q"),
        without("window_size"),
        without("softmax_scale"),
        exchanged("k_cache", "v_cache"),
        changed("cache_seqlens", lambda lengths: lengths - 1),
        changed("max_seqlen_q", lambda most: most - 1),
        changed("window_size", lambda window: (window[0] + 1, 0)),
        changed("page_table", lambda table: table.flip(0)),
        added("block_table", None),
    ],
)
def test_a_wrong_argument_of_flash_attn_3_is_found(fault):
    batch = paged_batch(BATCHES["chunks"], shape_of(4, 2, 64, 50), page=16)
    assert fails(flash_attn_3.loaded(faulty(libraries.with_kvcache_of_3(), fault), version=""), batch)


@pytest.mark.parametrize(
    "fault",
    [
        without("seqused_k"),
        without("block_table"),
        without("window_size"),
        without("scale"),
        without("num_splits"),
        without("enable_gqa"),
        exchanged("max_q", "max_k"),
        exchanged("key", "value"),
        exchanged("cu_seq_q", "cu_seq_k"),
        changed("seqused_k", lambda lengths: lengths - 1),
        changed("window_size", lambda window: (window[0] - 1, window[1])),
        changed("window_size", lambda window: (window[0], -1)),
        added("causal", True),
    ],
)
def test_a_wrong_argument_of_torch_is_found(fault):
    batch = paged_batch(BATCHES["chunks"], shape_of(4, 2, 64, 50), page=256)
    assert fails(torch_varlen.loaded(faulty(libraries.varlen_of_torch(), fault), version=""), batch)


@pytest.mark.parametrize(
    "fault",
    [
        without("causal"),
        without("softmax_scale"),
        exchanged("k", "v"),
        exchanged("cu_seqlens_q", "cu_seqlens_k"),
        exchanged("max_seqlen_q", "max_seqlen_k"),
        changed("max_seqlen_q", lambda most: most - 1),
        changed("cu_seqlens_k", lambda starts: starts.long()),
        changed("k", lambda k: k[1:]),
        changed("k", lambda k: k.roll(1, 0)),
        added("page_table", None),
    ],
)
def test_a_wrong_argument_of_fa3_fwd_is_found(fault):
    batch = paged_batch(BATCHES["chunks"], shape_of(4, 2, 64), page=16)
    assert fails(fa3_fwd.loaded(faulty(libraries.varlen_of_3_fwd(), fault), version=""), batch)


def test_what_fa3_fwd_does_not_compute_is_the_kernels_own():
    """Rows that are alone, and layers with a window; of a step with both kinds of rows it gets the prompts."""
    asked, own = [], []

    def noted(q, shape, kv, layer, step):
        own.append((len(q), shape.window))
        return REFERENCE.attention(q, shape, kv, layer, step)

    def seen(arguments):
        asked.append((len(arguments["q"]), len(arguments["k"])))
        return arguments

    loaded = fa3_fwd.loaded(faulty(libraries.varlen_of_3_fwd(), seen), version="")
    batch = paged_batch(BATCHES["mixed"], shape_of(4, 2, 64), page=16)
    found = FlashAttention(loaded, noted).attention(batch.q, batch.shape, batch.kv, LAYER, batch.step)
    assert is_close(found, batch)
    assert (asked, own) == ([(23, 535)], [(2, None)])
    windowed = replace(batch, shape=shape_of(4, 2, 64, 30))
    assert is_close(
        FlashAttention(loaded, noted).attention(batch.q, windowed.shape, batch.kv, LAYER, batch.step), windowed
    )
    assert own[1:] == [(25, 30)]


@pytest.mark.parametrize("load", [libraries.load_2, libraries.load_torch])
def test_pages_of_another_size_are_refused_by_the_stand_ins_too(load):
    with pytest.raises(RuntimeError, match="divisible by 256"):
        attend(load(), paged_batch(BATCHES["mixed"], shape_of(4, 2, 64), page=128))


def test_why_flash_attn_3_is_not_given_large_pages():
    """What a failed request left in slots that are not used any more would reach the results of others."""
    batch = paged_batch(BATCHES["mixed"], shape_of(4, 2, 64), page=64)
    assert attend(libraries.load_3(), batch).isnan().any()
    library, hopper = FlashAttn3(), (9, 0)
    assert "takes blocks of less than 64 tokens" in str(library.why_not(KVFormat(head_dim=64, block_size=64), hopper))
    assert library.why_not(KVFormat(head_dim=64, block_size=32), hopper) is None


def test_told_of_one_row_flash_attn_2_does_not_look_at_the_offsets():
    batch = paged_batch(BATCHES["mixed"], shape_of(4, 2, 64), page=256, unsampled=(1, 2))
    last = replace(batch, step=batch.step.sampled, q=batch.q[batch.step.sample_rows])
    told = faulty(libraries.varlen_of_2(), changed("max_seqlen_q", lambda most: most - 1))
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        attend(flash_attn_2.loaded(told, libraries.with_kvcache_of_2(), version=""), last)


def test_a_pool_of_another_model_is_refused():
    batch = paged_batch([(5, 5)], shape_of(4, 2, 64), page=256)
    ops = FlashAttention(libraries.load_2(), REFERENCE.attention)
    for shape in (shape_of(4, 4, 64), shape_of(4, 2, 32)):
        with pytest.raises(ValueError, match="made for another model"):
            ops.attention(batch.q, shape, batch.kv, LAYER, batch.step)
    with pytest.raises(ValueError, match="there is no layer 3"):
        ops.attention(batch.q, batch.shape, batch.kv, 3, batch.step)
    with pytest.raises(ValueError, match="the rows are"):
        ops.attention(batch.q.half(), batch.shape, batch.kv, LAYER, batch.step)


def fails(loaded: Loaded, batch: PagedBatch) -> bool:
    """Whether the call is refused, or its results are not the reference's."""
    try:
        found = attend(loaded, batch)
    except (AssertionError, IndexError, RuntimeError, TypeError, ValueError):
        return True
    return not is_close(found, batch)
