"""The measured quality loss of quantised checkpoints, kept in the user's cache folder.

Promises: files are whole or absent; a checkpoint that has changed since has no quality; a file that is unreadable, or
that other users may have written, counts as absent. Must not know: torch.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from quire_engine.contract.plan import EnginePlan
from quire_kernels.trusted_folder import UntrustedFolder, open_trusted, trusted

_FORMAT = 1  # version of the file format and of the measurement
_MOST_BYTES = 1 << 16  # most bytes of a file


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """A quantised model compared with the same model in bf16, on a fixed set of prompts."""

    checkpoint: str  # fingerprint of its files
    quantization: str | None  # of the weights
    kv_cache_dtype: str
    prompts: str  # "text", or "random ids" where there is no tokenizer
    num_positions: int  # of the prompts; each has a distribution of its next token
    mean_kl: float  # KL(bf16 || quantised) per position, nats
    max_kl: float
    greedy_agreement: float  # share of positions where both find the same token likeliest
    continuation_agreement: float  # share of greedy continuations before the first token that differs
    bf16_perplexity: float
    perplexity: float
    measured: str  # day, YYYY-MM-DD
    device: str = "cpu"  # or "cuda", whose kernels round otherwise

    def __str__(self) -> str:
        return (
            f"mean KL {self.mean_kl:.2g} nats, greedy agreement {self.greedy_agreement:.1%} (measured {self.measured})"
        )


def quality_text(plan: EnginePlan) -> str:
    """One line for the operator: the stored quality, or how to measure it; empty for a model that is not quantised."""
    if not _is_quantised(plan):
        return ""
    found = planned_quality(plan)
    return "not measured: run quire eval-quant" if found is None else str(found)


def planned_quality(plan: EnginePlan) -> Quality | None:
    """The stored quality of what a plan says is served; None where it is not quantised, or was not measured."""
    if not _is_quantised(plan):
        return None
    return stored_quality(plan.identity.checkpoint, plan.model.quantization, plan.pool.dtype, plan.machine.device)


def _is_quantised(plan: EnginePlan) -> bool:
    return plan.model.quantization is not None or plan.pool.dtype != "auto"


def stored_quality(
    checkpoint: str,
    quantization: str | None,
    kv_cache_dtype: str = "auto",
    device: str = "cpu",
    *,
    directory: Path | None = None,
) -> Quality | None:
    """The quality of the checkpoint with this fingerprint, if `quire eval-quant` measured it on this kind of device."""
    try:
        path = (directory or default_directory()) / _file_name(checkpoint, quantization, kv_cache_dtype, device)
        with open(open_trusted(path), "rb") as file:
            stored = json.loads(file.read(_MOST_BYTES))
        if stored.pop("format") != _FORMAT:
            return None
        found = Quality(**stored)
        str(found)  # raises where a field is not a number
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return found


def store_quality(quality: Quality, *, directory: Path | None = None) -> Path:
    """Store it, in place of an earlier measurement. Raises OSError."""
    directory = trusted(directory or default_directory())
    path = directory / _file_name(quality.checkpoint, quality.quantization, quality.kv_cache_dtype, quality.device)
    descriptor, temporary = tempfile.mkstemp(dir=directory, prefix=path.name)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump({"format": _FORMAT, **asdict(quality)}, file, indent=1)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


def default_directory() -> Path:
    """~/.cache/quire/quality. Raises UntrustedFolder for a user without a home."""
    try:
        return Path.home() / ".cache" / "quire" / "quality"
    except RuntimeError:
        raise UntrustedFolder("there is no home folder to keep measurements in (set HOME)") from None


def _file_name(checkpoint: str, quantization: str | None, kv_cache_dtype: str, device: str) -> str:
    kv = "" if kv_cache_dtype == "auto" else f"-kv-{kv_cache_dtype}"
    on = "" if device == "cpu" else f"-{device}"
    return f"{checkpoint}-{quantization or 'bf16'}{kv}{on}.json"
