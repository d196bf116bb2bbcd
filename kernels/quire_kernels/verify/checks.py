"""The list of checks: all of them for `quire verify`, a few for the start of a server.

Promises: the sizes are the served model's; a full list adds other sizes. Must not know: the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from quire_kernels.verify.attention import AttentionChecks
from quire_kernels.verify.experts import ExpertChecks, ExpertSizes, RoutingForm
from quire_kernels.verify.findings import Check, Subject
from quire_kernels.verify.heads import Heads
from quire_kernels.verify.layers import decodes_check, layers_check
from quire_kernels.verify.linear import LinearChecks, Matrix, embed_check
from quire_kernels.verify.operands import Numbers
from quire_kernels.verify.stored import StoredChecks

ROWS = (1, 2, 3, 5, 8, 16, 24, 32, 64, 128)
FEW_ROWS = (1, 7)
_MOST_WEIGHTS, _FEWEST_OUTPUTS = 1 << 20, 256  # per matrix; further columns are computed like these
_MOST_INNER = 2048  # columns of the MLP in checks of whole layers
_LENGTHS = (1, 2, 16, 17, 33, 64, 129, 300, 777, 1025)
_OTHER_LENGTHS = (1, 17, 130, 300)
# As in real models: few and many queries per key head, wide heads, a width that is no power of two, windows.
_OTHER_HEADS = (
    Heads(num_heads=16, num_kv_heads=8, head_dim=128, block_size=16),
    Heads(num_heads=4, num_kv_heads=4, head_dim=64, block_size=32, window=50, norms=False, softcap=30.0, sinks=True),
    Heads(num_heads=7, num_kv_heads=1, head_dim=64, block_size=64),
    Heads(num_heads=2, num_kv_heads=2, head_dim=80, block_size=16, norms=False),
    Heads(num_heads=2, num_kv_heads=1, head_dim=256, block_size=128, window=100),
    Heads(num_heads=8, num_kv_heads=1, head_dim=512, block_size=16),
)
_OTHER_EXPERTS = (
    ExpertSizes(count=6, top_k=2, hidden=96, inner=40, form=RoutingForm(scaled=True, own_norm=True)),
    ExpertSizes(
        count=12,
        top_k=3,
        hidden=96,
        inner=40,
        form=RoutingForm(scoring="sigmoid", biased=True, groups=4, kept_groups=2),
    ),
    ExpertSizes(count=4, top_k=3, hidden=130, inner=96, activation="swiglu_clamped", biases=True),
)
_OTHER_MATRICES = (Matrix(outputs=130, inputs=96), Matrix(outputs=384, inputs=1024))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The sizes of a model that the checks use."""

    hidden: int
    inner: int
    heads: Heads
    vocabulary: int
    experts: ExpertSizes | None = None

    @property
    def checked_inner(self) -> int:
        """Columns of the MLP in checks of whole layers."""
        return min(self.inner, _MOST_INNER)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Each distinct matrix, with few enough outputs for a fast check."""
        heads = self.heads
        width = heads.num_heads * heads.head_dim
        sizes = (
            (width + 2 * heads.num_kv_heads * heads.head_dim, self.hidden),
            (self.hidden, width),
            (self.inner, self.hidden),
            (self.hidden, self.inner),
            (self.vocabulary, self.hidden),
        )
        cut = ((min(n, max(_FEWEST_OUTPUTS, _MOST_WEIGHTS // k)), k) for n, k in sizes)
        return tuple(dict.fromkeys(Matrix(outputs=n, inputs=k) for n, k in cut))


def other_heads() -> tuple[Heads, ...]:
    """Attention shapes other than the model's; a set may not support them."""
    return _OTHER_HEADS


def linear_checks(subject: Subject, sizes: ModelSizes) -> Iterator[Check]:
    """Embedding, norms, projections and head, for every number of rows."""
    yield embed_check(subject, sizes.hidden)
    numbers: tuple[Numbers, ...] = ("exact", "normal")
    for matrix in (*sizes.matrices, *_OTHER_MATRICES):
        for kind in numbers:
            of_matrix = LinearChecks(subject, matrix, kind, ROWS)
            yield from of_matrix.checks()
            if subject.kernels.part_of is not None:
                yield from of_matrix.column_checks()
    yield from StoredChecks(subject, ROWS).checks()
    if subject.kernels.mix_experts is not None:
        for experts in (*([sizes.experts.cut()] if sizes.experts else ()), *_OTHER_EXPERTS):
            yield from ExpertChecks(subject, experts, ROWS).checks()
    yield from bound_checks(subject, sizes)


def attention_checks(subject: Subject, heads: Heads, *, own: bool) -> Iterator[Check]:
    """The pool, rope_write and attention. `own`: these are the model's heads.

    Inexact numbers are used only with pools that store them unchanged: the quality loss by rounding keys and values is
    measured elsewhere.
    """
    for kind in _kinds(subject):
        yield from AttentionChecks(subject, heads, kind, _LENGTHS if own else _OTHER_LENGTHS, ROWS).checks()


def short_checks(subject: Subject, sizes: ModelSizes) -> Iterator[Check]:
    """Each op once or twice at the model's sizes, fast enough for the start of a server."""
    yield embed_check(subject, sizes.hidden)
    yield from short_linear_checks(subject, sizes)
    yield from StoredChecks(subject, FEW_ROWS).checks()
    if subject.kernels.mix_experts is not None and sizes.experts is not None:
        yield from ExpertChecks(subject, sizes.experts.cut(), FEW_ROWS).checks()
    yield from short_attention_checks(subject, sizes)
    yield from bound_checks(subject, sizes)


def short_linear_checks(subject: Subject, sizes: ModelSizes) -> Iterator[Check]:
    """Norms, projections and head of each matrix of the model, for a few rows."""
    for matrix in sizes.matrices:
        yield from LinearChecks(subject, matrix, "normal", FEW_ROWS).checks()


def short_attention_checks(subject: Subject, sizes: ModelSizes) -> Iterator[Check]:
    """The pool, rope_write and attention at the model's heads, for contexts of up to 300 tokens."""
    for kind in _kinds(subject):
        yield from AttentionChecks(subject, sizes.heads, kind, (1, 33, 300), FEW_ROWS).checks()


def bound_checks(subject: Subject, sizes: ModelSizes) -> Iterator[Check]:
    """Whole layers, for a set that computes them otherwise than op by op."""
    if subject.kernels.bind_layers is not None:
        yield layers_check(subject, sizes.heads, hidden=sizes.hidden, inner=sizes.checked_inner)
    if subject.kernels.bind_decodes is not None:
        yield decodes_check(subject, sizes.heads, hidden=sizes.hidden, inner=sizes.checked_inner)


def _kinds(subject: Subject) -> tuple[Numbers, ...]:
    return ("exact", "normal") if subject.kv_type == "auto" else ("exact",)
