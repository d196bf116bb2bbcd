"""The checks that show an optional path on a device: short for the start of a server, and long for `quire verify`.

Promises: results are held against the reference or against the same set's single ops, at the served model's sizes.
Must not know: the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from quire_kernels.optional_paths import (
    DECODE_CHAIN,
    DEPENDENT_LAUNCH,
    FLASH_ATTENTION,
    FP8_CACHE,
    FUSED_GATE_UP,
    GRAPHS,
    PACKED_WEIGHTS,
    STORED_PRODUCTS,
    UNMASKED_PROMPTS,
)
from quire_kernels.verify.checks import (
    FEW_ROWS,
    ModelSizes,
    bound_checks,
    short_attention_checks,
    short_linear_checks,
)
from quire_kernels.verify.findings import Check, Subject
from quire_kernels.verify.layers import Capture, replay_check
from quire_kernels.verify.stored import StoredChecks

PathChecks = Callable[[Subject, ModelSizes, Capture], Iterator[Check]]


def path_checks(path: str, subject: Subject, sizes: ModelSizes, capture: Capture) -> Iterator[Check]:
    """The checks of what a path computes, for a set that takes it. `capture`: of this device."""
    return _CHECKS[path](subject, sizes, capture)


def _products(subject: Subject, sizes: ModelSizes, capture: Capture) -> Iterator[Check]:
    del capture
    return short_linear_checks(subject, sizes)


def _attention(subject: Subject, sizes: ModelSizes, capture: Capture) -> Iterator[Check]:
    del capture
    return short_attention_checks(subject, sizes)


def _stored(subject: Subject, sizes: ModelSizes, capture: Capture) -> Iterator[Check]:
    del sizes, capture
    return StoredChecks(subject, FEW_ROWS).checks()


def _gate_up(subject: Subject, sizes: ModelSizes, capture: Capture) -> Iterator[Check]:
    del capture
    return (check for check in short_linear_checks(subject, sizes) if check.op == "norm_gate_up")


def _decodes(subject: Subject, sizes: ModelSizes, capture: Capture) -> Iterator[Check]:
    del capture
    return bound_checks(subject, sizes)


def _graphs(subject: Subject, sizes: ModelSizes, capture: Capture) -> Iterator[Check]:
    yield replay_check(subject, sizes.heads, capture, hidden=sizes.hidden, inner=sizes.checked_inner)


_CHECKS: dict[str, PathChecks] = {
    PACKED_WEIGHTS: _products,
    FP8_CACHE: _attention,
    STORED_PRODUCTS: _stored,
    UNMASKED_PROMPTS: _attention,
    FUSED_GATE_UP: _gate_up,
    FLASH_ATTENTION: _attention,
    DECODE_CHAIN: _decodes,
    DEPENDENT_LAUNCH: _decodes,
    GRAPHS: _graphs,
}
