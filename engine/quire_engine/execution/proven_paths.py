"""The optional paths that a GPU has proven at a start or before, and what serves in place of the others.

Promises: checks run in a child process; what they found is kept for this device, its driver, these versions and
kernels, and this configuration, so that the next start asks nothing. Must not know: requests, the server.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import quire_kernels
from quire_engine.contract.config import EngineConfig
from quire_engine.execution.kernel_checks import model_sizes, repaired
from quire_engine.execution.models.config import ModelConfig
from quire_engine.execution.models.found import FoundModel
from quire_engine.execution.progress import Tell
from quire_engine.execution.prover_process import ProverProcess, Stuck
from quire_engine.execution.verdict import Verdict, verdict_of
from quire_engine.machine import gpu_driver
from quire_engine.own_modules import module_command
from quire_kernels.kernel_set import KernelSet, KVFormat
from quire_kernels.optional_paths import FLASH_ATTENTION, FP8_CACHE, NAMES, PACKED_WEIGHTS, PATHS
from quire_kernels.provider import Requirements
from quire_kernels.reference import REFERENCE
from quire_kernels.triton.provider import TritonProvider
from quire_kernels.trusted_folder import open_trusted, trusted

_log = logging.getLogger(__name__)
_FORMAT = 1  # of the files, and of what the checks compare
_MOST_BYTES = 1 << 18
_CHECKED = ("auto", "triton")  # choices of kernels, of which others are the reference's or refused on a GPU
_SIGN_SECONDS = 5.0
_LONGEST = 600.0  # seconds of the child, in which it may compile every kernel; beyond them its device is stuck
PATIENCE: Mapping[str, float] = {}  # other than the child's own


def asked_paths(config: EngineConfig) -> tuple[str, ...]:
    """The optional paths that the settings ask for."""
    asked = {
        PACKED_WEIGHTS: config.quantization is not None,
        FP8_CACHE: config.kv_cache_dtype == "fp8",
        FLASH_ATTENTION: config.attention == "flash-attn",
    }
    return tuple(name for name, is_asked in asked.items() if is_asked)


def without_paths(config: EngineConfig) -> EngineConfig:
    """The settings without those that ask for a path which is left out."""
    left_out = config.left_out_paths or ()
    if PACKED_WEIGHTS in left_out:
        config = replace(config, quantization=None)
    if FP8_CACHE in left_out and config.kv_cache_dtype == "fp8":
        config = replace(config, kv_cache_dtype="auto")
    if FLASH_ATTENTION in left_out and config.attention == "flash-attn":
        config = replace(config, attention="auto")
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """The outcome for one start."""

    config: EngineConfig  # with what is left out, and without the settings that ask for it
    verdict: Verdict
    why_none: str = ""  # the reason why nothing could be checked

    def repaired(self, kernels: KernelSet) -> tuple[KernelSet, tuple[str, ...]]:
        """The kernels of this configuration without ops that failed, and their names. Raises ConfigError."""
        failed = {} if kernels.name == REFERENCE.name else self.verdict.ops
        if not failed:
            return kernels, ()
        pool, deterministic = self.verdict.reference_pool, self.config.deterministic
        return repaired(kernels, failed, reference_pool=pool, deterministic=deterministic), tuple(failed)

    def tell(self, kernels: KernelSet) -> tuple[str, ...]:
        """Log each path that is left out of these kernels, where this start has asked, and why; their names."""
        possible = {*self.verdict.possible, *kernels.optional}
        left_out = [path for path in PATHS if path.name in possible & set(self.config.left_out_paths or ())]
        for path in left_out if self.verdict.possible or self.why_none else ():
            not_yet = self.why_none or "there was no time to check it, the next start goes on"
            _log.warning(
                "the optional path %s is left out on this GPU, instead: %s (%s)",
                path.name, path.plain, self.verdict.paths.get(path.name) or not_yet,
            )  # fmt: skip
        return tuple(path.name for path in left_out)


def may_be_asked(config: EngineConfig) -> bool:
    """Whether a start with these settings may have to check a GPU: known without touching it."""
    is_open = config.left_out_paths is None and not config.trust_gpu_paths
    return is_open and config.device != "cpu" and config.kernels in _CHECKED and bool(gpu_driver())


def shown_here(  # noqa: PLR0917 - what is known of a start before its kernels are chosen
    config: EngineConfig,
    found: FoundModel,
    device: torch.device,
    dtype: torch.dtype,
    tell: Tell,
    prover: ProverProcess | None = None,
) -> Shown:
    """Find out what this GPU has shown, now or at an earlier start: not for a CPU, nor for models of others' code.

    `prover`: a process that is ready to check; None: one is launched where it is needed.
    """
    model = found.facts
    if not isinstance(model, ModelConfig) or config.trust_gpu_paths or not _is_checked(config, found, device, dtype):
        return unchecked(config)
    try:
        path = _directory() / f"{_key(config, model, device, dtype)}.json"
    except (RuntimeError, AssertionError):  # AssertionError: a torch without CUDA; the choice of kernels says so
        return unchecked(config)
    verdict, why_none = _remembered(path), ""
    if not verdict.is_complete:
        started = time.perf_counter()
        try:
            verdict = _ask(config, dtype, verdict, tell, prover)
            _remember(path, verdict.lasting)
        except _NoVerdict as error:
            why_none = f"it could not be checked: {error}"
        _log.info("the kernels were checked in %.1f s", time.perf_counter() - started)
    known = config.left_out_paths
    if known is None:
        # A path that a setting asks for is left out only where it is known to fail.
        kept = asked_paths(config) if why_none else ()
        known = tuple(name for name in NAMES if verdict.paths.get(name) != "" and name not in kept)
    return Shown(config=without_paths(replace(config, left_out_paths=known)), verdict=verdict, why_none=why_none)


def unchecked(config: EngineConfig) -> Shown:
    """The outcome where nothing is asked: every path serves that is not known to be left out."""
    return Shown(config=without_paths(replace(config, left_out_paths=config.left_out_paths or ())), verdict=Verdict())


def _is_checked(config: EngineConfig, found: FoundModel, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton kernels may serve. Where they cannot, others do, or the choice of kernels is refused."""
    if device.type != "cuda" or config.kernels not in _CHECKED:
        return False
    kv = KVFormat(head_dim=found.head_dim, block_size=config.limits.block_size, kv_type=config.kv_cache_dtype)
    required = Requirements(
        device=device, dtype=dtype, kv=kv, quantization=config.quantization, cpu_variant=config.cpu_variant
    )
    return TritonProvider().why_not(required) is None


class _NoVerdict(Exception):
    """The child had none; the text says why."""


def _ask(
    config: EngineConfig, dtype: torch.dtype, verdict: Verdict, tell: Tell, prover: ProverProcess | None
) -> Verdict:
    """The verdict of a child process. Raises _NoVerdict."""
    own = replace(config, faults=(), left_out_paths=None)
    asked = {
        "config": asdict(own),
        "dtype": str(dtype).removeprefix("torch."),
        "verdict": asdict(verdict),
        "patience": dict(PATIENCE),
    }

    def go_on() -> None:
        tell("checking the kernels and the optional paths of this GPU", 0, 0)

    try:
        process = prover or ProverProcess.launched(_command())
        said = process.ask(json.dumps(asked).encode() + b"\n", go_on=go_on, every=_SIGN_SECONDS, longest=_LONGEST)
    except (OSError, Stuck) as error:
        raise _NoVerdict(str(error)) from None
    return _read(*said)


def _read(data: bytes, code: int) -> Verdict:
    try:
        said: dict[str, Any] = json.loads(data)
        reason = said.get("broken") or said.get("error")
        if reason is None:
            return verdict_of(said)
    except (ValueError, AttributeError):
        reason = f"its process ended with {code}"
    raise _NoVerdict(str(reason))


def _command() -> list[str]:
    return module_command("quire_engine.tools.prover")


def _directory() -> Path:
    with suppress(RuntimeError):
        return Path.home() / ".cache" / "quire" / "gpu-paths"
    return Path(tempfile.gettempdir()) / f"quire-gpu-paths-{os.getuid()}"


def _key(config: EngineConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype) -> str:
    """The name of everything that a verdict depends on."""
    facts = (
        _FORMAT,
        torch.cuda.get_device_name(device),
        torch.cuda.get_device_capability(device),
        gpu_driver(),
        torch.__version__,
        torch.version.cuda,
        _triton(),
        _kernels_hash(),
        dtype,
        config.kernels,
        config.quantization,
        config.kv_cache_dtype,
        config.attention,
        config.deterministic,
        model_sizes(model, config.limits.block_size),
    )
    return sha256(repr(facts).encode()).hexdigest()


def _triton() -> str:
    for name in ("triton", "pytorch-triton"):
        with suppress(PackageNotFoundError):
            return version(name)
    return ""


def _kernels_hash() -> str:
    """A digest of the kernels' source files, their checks among them."""
    digest = sha256()
    root = Path(next(iter(quire_kernels.__path__)))
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _remembered(path: Path) -> Verdict:
    """The verdict in a file; an empty one where there is none that can be trusted."""
    try:
        with open(open_trusted(path), "rb") as file:
            return verdict_of(json.loads(file.read(_MOST_BYTES)))
    except (OSError, ValueError, TypeError, RecursionError):
        return Verdict()


def _remember(path: Path, verdict: Verdict) -> None:
    try:
        folder = trusted(path.parent)
        descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=path.name)
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(verdict), file, indent=1)
        os.replace(temporary, path)
    except OSError as error:
        _log.warning("what this GPU has shown cannot be kept, and is checked again at the next start: %s", error)
