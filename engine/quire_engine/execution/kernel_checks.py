"""The short check of a kernel set before it serves, and the set without the ops that failed.

Promises: what fails is replaced by the reference's op with a warning, or the start ends with a ConfigError; never
silently. Must not know: which kernel sets there are, requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import torch

from quire_engine.errors import ConfigError
from quire_engine.execution.choice_checks import choice_checks
from quire_engine.execution.models.config import ModelConfig
from quire_kernels.kernel_set import KernelSet
from quire_kernels.verify.attention import like_reference
from quire_kernels.verify.checks import ModelSizes, short_checks
from quire_kernels.verify.findings import Check, Finding, Subject
from quire_kernels.verify.heads import Heads
from quire_kernels.verify.repair import Irreplaceable, without
from quire_kernels.verify.watch import PATIENCE, run_checks

_log = logging.getLogger(__name__)
_ROWS = (1, 7)
_ADVICE = "run `quire verify` and send what it writes; set kernels to reference to serve without them"


def model_sizes(model: ModelConfig, block_size: int) -> ModelSizes:
    """What the checks need to know of a model."""
    heads = Heads(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=block_size,
        window=min((window for window in model.windows if window is not None), default=None),
        norms=model.qk_norm,
    )
    return ModelSizes(hidden=model.hidden_size, inner=model.intermediate_size, heads=heads, vocabulary=model.vocab_size)


def checked(subject: Subject, sizes: ModelSizes, *, patience: float = PATIENCE) -> tuple[KernelSet, tuple[str, ...]]:
    """The set that can serve, and which of its ops are now the reference's or gone. Raises ConfigError."""
    started, name = time.perf_counter(), subject.kernels.name
    failed = _failures(subject, sizes, patience)
    for op, finding in failed.items():
        _log.warning(
            "the %s op of the %s kernels failed on this machine and is replaced by a slower one: %s: %s; %s",
            op, name, finding.case, finding.problem, "run `quire verify` and send what it writes",
        )  # fmt: skip
    kernels = subject.kernels
    try:
        if failed:
            fits = "new_kv" not in failed and like_reference(subject, sizes.heads)
            kernels = without(
                kernels, failed, reference_pool=fits, deterministic=subject.alone and subject.device.type != "cpu"
            )
    except Irreplaceable as error:
        ops = ", ".join(f"{op} ({finding.problem})" for op, finding in failed.items())
        raise ConfigError(f"kernels={name}: these ops failed on this machine: {ops}; {error}; {_ADVICE}") from None
    _log.info("the %s kernels were checked in %.1f s", name, time.perf_counter() - started)
    return kernels, tuple(failed)


def _failures(subject: Subject, sizes: ModelSizes, patience: float) -> dict[str, Finding]:
    """The first of each op. Raises ConfigError where nothing can go on."""
    failed: dict[str, Finding] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # what is expected is small: threads would wait for each other longer than they compute
    try:
        for finding in run_checks(_checks(subject, sizes), device=subject.device, patience=patience):
            if finding.fatal:
                named = f"kernels={subject.kernels.name}: the {finding.op} op"
                raise ConfigError(f"{named} {finding.problem} ({finding.case}); {_ADVICE}")
            if not finding.ok:
                failed.setdefault(finding.op, finding)
    finally:
        torch.set_num_threads(threads)
    return failed


def _checks(subject: Subject, sizes: ModelSizes) -> Iterator[Check]:
    yield from short_checks(subject, sizes)
    yield from choice_checks(subject, sizes.vocabulary, _ROWS)
