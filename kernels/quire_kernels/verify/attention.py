"""Checks of the pool, of rope_write and of attention.

Promises: all memory that a step must not read holds NaN: block 0, free slots, the other layer, the spare block. Every
batch of `batches` is compared with `reference` in float32, and some of its rows with the same row alone. Must not know:
the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from quire_kernels.kernel_set import AttentionRows, AttentionShape, PoolPart
from quire_kernels.reference import REFERENCE
from quire_kernels.reference.linear import rms_norm
from quire_kernels.verify import tolerance
from quire_kernels.verify.exact_attention import attention_bound
from quire_kernels.verify.findings import Check, Outcome, Subject, bits, close, compared_alone, same, together
from quire_kernels.verify.heads import Heads, batches
from quire_kernels.verify.operands import Numbers, Source, quarter_turns, usual_angles
from quire_kernels.verify.steps import Slice, Tables

_CPU = torch.device("cpu")
_LAYER, _NUM_LAYERS = 1, 2
_POISON = 0xFF  # in every byte: NaN in float32, bfloat16, float16 and e4m3
_EPS = 1e-6


class _Truth(NamedTuple):
    q: Tensor  # [T, Hq, D] float32, the result of rope_write
    q_bound: Tensor
    keys: Tensor  # [T, Hkv, D] float32, the keys that rope_write stores
    key_bound: Tensor
    out: Tensor  # [T, Hq * D] float32, attention of the queries rounded to the model's dtype
    bound: Tensor


class AttentionChecks:
    """Checks of the ops on one shape, one pool and one kind of numbers."""

    def __init__(
        self, subject: Subject, heads: Heads, numbers: Numbers, lengths: Sequence[int], rows: Sequence[int]
    ) -> None:
        self._subject, self._heads, self._exact = subject, heads, numbers == "exact"
        self._name = f"{heads}, {numbers}"
        self._batches = list(batches(lengths, rows))
        self._tables = Tables(lengths, heads.block_size)
        source, dtype, width = Source(heads.head_dim), subject.dtype, heads.head_dim
        total, q_heads, kv_heads = sum(lengths), heads.num_heads, heads.num_kv_heads
        if self._exact and heads.norms:
            # A head's numbers have one magnitude, so the norm maps them to signs and the result is the norm's weight.
            q, k = (source.signs(total, n, width) * source.powers(-2, 2, total, n, 1) for n in (q_heads, kv_heads))
            norms = (source.bytes(width) * 2.0**-6, source.stored(subject.kv_type, width))
        else:
            q = source.normal(total, q_heads, width)
            k = (
                source.stored(subject.kv_type, total, kv_heads, width)
                if self._exact
                else source.normal(total, kv_heads, width)
            )
            norms = (1 + 0.2 * source.normal(width), 1 + 0.2 * source.normal(width))
        self._v = (
            source.stored(subject.kv_type, total, kv_heads, width)
            if self._exact
            else source.normal(total, kv_heads, width)
        ).to(dtype)
        self._qkv = torch.cat([q.to(dtype), k.to(dtype), self._v], dim=1).flatten(1)  # [T, (Hq + 2 Hkv) * D]
        self._rope = quarter_turns(max(lengths), width) if self._exact else usual_angles(max(lengths), width)
        q_norm, k_norm = (x.to(dtype) for x in norms)
        self._shape = AttentionShape(
            num_heads=q_heads,
            num_kv_heads=kv_heads,
            head_dim=width,
            scale=width**-0.5,
            window=heads.window,
            q_norm=q_norm if heads.norms else None,
            k_norm=k_norm if heads.norms else None,
            norm_eps=0.0 if self._exact else _EPS,
            softcap=heads.softcap,
            sinks=2 * source.normal(q_heads).float() if heads.sinks else None,
        )
        self._alone: dict[tuple[int, int], Tensor] = {}

    def checks(self) -> Iterator[Check]:
        """All of them."""
        yield self._check("new_kv", "", self._check_pool)
        yield self._check("rope_write", f"{len(self._qkv)} rows", self._check_write)
        yield self._check("rope_write", "row by row", self._check_rows_alone)
        for name, slices in self._batches:
            yield self._check("attention", name, self._attends(slices))
        yield self._check("kv_part", "layers of a larger pool", self._check_part)
        copies = "new_kv" if self._subject.kernels.copy_blocks is None else "copy_blocks"
        yield self._check(copies, "a copied block", self._check_copy)

    def _check(self, op: str, case: str, run: Callable[[], Outcome]) -> Check:
        return Check(op=op, case=f"{self._name}, {case}" if case else self._name, run=run)

    def _new_kv(self) -> Tensor:
        heads, subject = self._heads, self._subject
        sizes = (self._tables.num_blocks, _NUM_LAYERS, heads.num_kv_heads, heads.block_size, heads.head_dim)
        return subject.kernels.new_kv(*sizes, subject.dtype, subject.device)

    @cached_property
    def _like_reference(self) -> bool:
        return like_reference(self._subject, self._heads)

    def _check_pool(self) -> Outcome:
        heads, subject = self._heads, self._subject
        kv = self._new_kv()
        if not kv.is_contiguous() or kv.shape[0] != self._tables.num_blocks:
            return Outcome(
                problem=f"a pool of {list(kv.shape)} does not begin with its {self._tables.num_blocks} blocks"
            )
        if bool(kv.view(torch.uint8).any()):
            return Outcome(problem="a new pool is not zero")
        each = subject.kernels.kv_block_bytes(
            _NUM_LAYERS, heads.num_kv_heads, heads.block_size, heads.head_dim, subject.dtype
        )
        if each != kv.nbytes // len(kv):
            return Outcome(problem=f"a block has {kv.nbytes // len(kv)} bytes, not the {each} that were counted")
        return Outcome()

    @cached_property
    def _truth(self) -> _Truth:
        """The results of `reference` in float32, and bounds for the rounding of each."""
        shape, dtype = _wide(self._shape), self._subject.dtype
        heads = self._heads
        rows = self._tables.rows(self._tables.whole(), _CPU)
        sizes = (self._tables.num_blocks, 1, heads.num_kv_heads, heads.block_size, heads.head_dim)
        kv = REFERENCE.new_kv(*sizes, torch.float32, _CPU)
        q = REFERENCE.rope_write(self._qkv.float(), self._rope, shape, kv, 0, rows)
        keys = _at(kv[:, 0, 0], rows)
        given = q.to(dtype)
        out = REFERENCE.attention(given.float(), shape, kv, 0, rows)
        bounds, first = [], 0
        for length in self._tables.lengths:
            part = slice(first, first + length)
            first += length
            bounds.append(
                attention_bound(
                    given[part], keys[part], self._v[part], out[part], shape, dtype,
                    key_roundings=0 if self._exact else 3,
                )
            )  # fmt: skip
        rotated = self._qkv.view(len(q), -1, heads.head_dim)[:, : heads.num_heads + heads.num_kv_heads]
        q_bound = self._rotated_bound(rotated[:, : heads.num_heads], shape.q_norm, q)
        key_bound = self._rotated_bound(rotated[:, heads.num_heads :], shape.k_norm, keys)
        return _Truth(q, q_bound, keys, key_bound, out, torch.cat(bounds))

    def _rotated_bound(self, x: Tensor, norm: Tensor | None, truth: Tensor) -> Tensor:
        """Bound for two roundings of each number by the norm, a float32 rotation and one rounding of the result."""
        normed = x.float() if norm is None else rms_norm(x.float(), norm, self._shape.norm_eps)
        length = (normed.square() + normed.roll(x.shape[-1] // 2, dims=-1).square()).sqrt()
        bound = tolerance.rounded(truth, self._subject.dtype) + tolerance.float32_sum(x.shape[-1] + 8, length)
        return bound if self._exact or norm is None else bound + 2 * tolerance.rounded(length, self._subject.dtype)

    def _write(self, kv: Tensor, slices: Sequence[Slice]) -> Tensor:
        device = self._subject.device
        rows = self._tables.rows(slices, device)
        qkv, shape = self._qkv[self._index(slices)].to(device), self._on_device
        return self._subject.kernels.rope_write(qkv, self._rope.to(device), shape, kv, _LAYER, rows)

    @cached_property
    def _on_device(self) -> AttentionShape:
        """The shape with its norms and sinks on the device; one object for all calls, as a layer has one."""
        constants = (self._shape.q_norm, self._shape.k_norm, self._shape.sinks)
        q_norm, k_norm, sinks = (None if each is None else each.to(self._subject.device) for each in constants)
        return replace(self._shape, q_norm=q_norm, k_norm=k_norm, sinks=sinks)

    def _index(self, slices: Sequence[Slice]) -> Tensor:
        """Indices of the slices' rows among the rows of all sequences."""
        firsts = torch.tensor([0, *self._tables.lengths]).cumsum(0)
        return torch.cat([torch.arange(part.start, part.end) + firsts[part.sequence] for part in slices])

    def _poisoned(self) -> Tensor:
        kv = self._new_kv()
        kv.view(torch.uint8).fill_(_POISON)
        return kv

    def _check_write(self) -> Outcome:
        kv = self._poisoned()
        q, truth = self._write(kv, self._tables.whole()), self._truth
        untouched = [0, self._tables.spare]
        if bool((kv[untouched].view(torch.uint8) != _POISON).any()):
            return Outcome(problem="a block was written that no row belongs to")
        outcome = close(q, truth.q, truth.q_bound)
        if not self._like_reference:
            return outcome
        rows = self._tables.rows(self._tables.whole(), self._subject.device)
        keys, values = (_at(kv[:, _LAYER, half], rows) for half in range(2))
        return together(
            outcome, close(keys, truth.keys, truth.key_bound), same(values.cpu(), self._v, "the values in the pool")
        )

    def _check_rows_alone(self) -> Outcome:
        """Compare the first rows of a call with the same rows one at a time: equal queries and equal pool bytes."""
        part = Slice(max(range(len(self._tables.lengths)), key=lambda i: self._tables.lengths[i]), 0, 19)
        whole, single = self._poisoned(), self._poisoned()
        together_q = self._write(whole, [part])
        alone_q = torch.cat([self._write(single, [Slice(part.sequence, p, 1)]) for p in range(part.rows)])
        equal = bool((bits(whole) == bits(single)).all()) and bool((bits(together_q) == bits(alone_q)).all())
        return compared_alone(equal, self._subject, "a row of rope_write")

    @cached_property
    def _filled(self) -> Tensor:
        """A pool with all sequences, written by the reference if possible, so that only attention is tested."""
        kv = self._poisoned()
        if not self._like_reference:
            self._write(kv, self._tables.whole())
            return kv
        device = self._subject.device
        rows = self._tables.rows(self._tables.whole(), device)
        REFERENCE.rope_write(self._qkv.to(device), self._rope.to(device), self._on_device, kv, _LAYER, rows)
        return kv

    def _attend(self, kv: Tensor, slices: Sequence[Slice], rows: AttentionRows | None = None) -> Tensor:
        device = self._subject.device
        q = self._truth.q[self._index(slices)].to(device, self._subject.dtype)
        rows = rows or self._tables.rows(slices, device)
        return self._subject.kernels.attention(q, self._on_device, kv, _LAYER, rows)

    def _attends(self, slices: list[Slice]) -> Callable[[], Outcome]:
        def run() -> Outcome:
            index, truth = self._index(slices), self._truth
            found = self._attend(self._filled, slices)
            if found.dtype != self._subject.dtype:
                return Outcome(problem=f"the result is {found.dtype}, not {self._subject.dtype}")
            outcomes = [close(found, truth.out[index], truth.bound[index])]
            row = 0
            for number, part in enumerate(slices):
                row += part.rows
                if len(index) > 1 and number in (0, len(slices) // 2, len(slices) - 1):
                    equal = not same(found[row - 1], self._row_alone(part.sequence, part.end - 1), "").problem
                    outcomes.append(compared_alone(equal, self._subject, f"row {row - 1} of {len(index)}"))
            return together(*outcomes)

        return run

    def _row_alone(self, sequence: int, position: int) -> Tensor:
        """Attention for this position in a step of its own."""
        key = sequence, position
        if key not in self._alone:
            self._alone[key] = self._attend(self._filled, [Slice(sequence, position, 1)])[0]
        return self._alone[key]

    def _check_part(self) -> Outcome:
        """The ops on a part of larger blocks give what they give on a pool, and touch nothing else of the blocks."""
        heads, kernels = self._heads, self._subject.kernels
        sizes = (heads.num_kv_heads, heads.block_size, heads.head_dim, self._subject.dtype, self._subject.device)
        whole = kernels.new_kv(self._tables.num_blocks, _NUM_LAYERS + 2, *sizes)
        whole.view(torch.uint8).fill_(_POISON)
        before = PoolPart(1, heads.num_kv_heads, heads.head_dim)
        kind = heads.num_kv_heads, heads.head_dim
        part = kernels.kv_part(whole, kind, before._replace(num_layers=_NUM_LAYERS, before=(before,)))
        alone, slices = self._poisoned(), self._tables.whole()
        outcomes = [same(self._write(part, slices), self._write(alone, slices), "the queries")]
        outcomes.append(same(self._attend(part, slices), self._attend(alone, slices), "attention over a part"))
        outcomes.append(same(bits(part), bits(alone), "the part of the blocks"))
        if bool((whole[:, [0, _NUM_LAYERS + 1]].view(torch.uint8) != _POISON).any()):
            outcomes.append(Outcome(problem="bytes beside the part were written"))
        return together(*outcomes)

    def _check_copy(self) -> Outcome:
        """Attention gives the same result with the first block of a sequence copied to the spare block."""
        sequence = len(self._tables.lengths) - 1
        part, source = [Slice(sequence, self._tables.lengths[sequence] - 1, 1)], self._tables.blocks[sequence][0]
        kv = self._filled.clone()
        wanted = self._attend(kv, part)
        if self._subject.kernels.copy_blocks is None:
            kv[self._tables.spare] = kv[source]
        else:
            self._subject.kernels.copy_blocks(kv, [(source, self._tables.spare)])
        kv[source].view(torch.uint8).fill_(_POISON)
        rows = self._tables.rows(part, self._subject.device)
        rows.block_tables[0, 0] = self._tables.spare
        return same(self._attend(kv, part, rows), wanted, "attention after a copy")


def like_reference(subject: Subject, heads: Heads) -> bool:
    """Whether a pool of the set has the reference's layout, so that the reference's ops can serve on it."""
    sizes = (2, _NUM_LAYERS, heads.num_kv_heads, heads.block_size, heads.head_dim, subject.dtype, subject.device)
    ours, reference = subject.kernels.new_kv(*sizes), REFERENCE.new_kv(*sizes)
    return ours.shape == reference.shape and ours.dtype == reference.dtype and ours.stride() == reference.stride()


def _wide(shape: AttentionShape) -> AttentionShape:
    q_norm, k_norm = (None if norm is None else norm.float() for norm in (shape.q_norm, shape.k_norm))
    return replace(shape, q_norm=q_norm, k_norm=k_norm)


def _at(half: Tensor, rows: AttentionRows) -> Tensor:
    """The keys or values of the rows' slots, [T, Hkv, D], from K or V [blocks, Hkv, block_size, D]."""
    size = half.shape[2]
    return half[rows.kv_slots // size, :, rows.kv_slots % size]
