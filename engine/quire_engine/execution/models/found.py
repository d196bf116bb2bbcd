"""The choice of the implementation that computes a model: an entry of ours, or transformers' code.

Promises: nothing but configuration and headers of files is read. Must not know: requests.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from quire_engine.contract.config import EngineConfig
from quire_engine.contract.errors import ConfigError, ModelLoadError, NotNative
from quire_engine.execution.device import resolve_device
from quire_engine.execution.models.config import ModelConfig, load_model_config
from quire_engine.execution.models.parameters import Parameters, count_parameters
from quire_engine.execution.models.served import ModelFacts
from quire_engine.execution.models.weights import with_own_head
from quire_kernels.kernel_set import KernelSet

_log = logging.getLogger(__name__)


class FoundModel(Protocol):
    """A model and what follows from its implementation."""

    @property
    def implementation(self) -> str: ...  # empty: ours
    @property
    def facts(self) -> ModelFacts: ...
    @property
    def asked(self) -> EngineConfig: ...  # with the settings that the model needs
    @property
    def head_dim(self) -> int: ...  # of the kernels' pool
    @property
    def state_bytes(self) -> int: ...  # that a sequence takes outside of the pool
    def over(self, kernels: KernelSet) -> KernelSet:
        """The kernels with the model's own pool, where it has one."""
        ...

    def divides_heads(self, size: int) -> bool:
        """Whether ranks have a share of the heads each; otherwise each has all of them."""
        ...

    def parameters(self, path: Path) -> Parameters:
        """The counts by use. Raises ModelLoadError where the files' headers are wrong."""
        ...


@dataclass(frozen=True, slots=True)
class NativeModel:
    """See `FoundModel`: an entry of ours."""

    facts: ModelConfig
    asked: EngineConfig
    implementation: str = ""
    state_bytes: int = 0

    @property
    def head_dim(self) -> int:
        # Of several widths the one that kernels are least likely to take.
        return max((heads.width for heads in self.facts.kv_heads), key=lambda width: (width % 16 != 0, width))

    def over(self, kernels: KernelSet) -> KernelSet:
        return kernels

    def divides_heads(self, size: int) -> bool:
        del size  # numbers that do not divide them are refused
        return True

    def parameters(self, path: Path) -> Parameters:
        return count_parameters(path, self.facts)


def find_model(config: EngineConfig) -> FoundModel:
    """The model by an entry of ours, or by transformers' code. Raises ConfigError, ModelLoadError."""
    reason = ""
    if config.model_impl != "transformers":
        try:
            facts = load_model_config(Path(config.model), config.ignore_config_keys)
            facts = with_own_head(Path(config.model), facts)
            return NativeModel(facts, _for_whole_prompts(config, facts) if facts.bidirectional else config)
        except NotNative as error:
            if config.model_impl == "native":
                raise
            reason = str(error)
    # Imported here: transformers takes seconds to import, and most models do without.
    from quire_engine.execution.models.fallback import parts  # noqa: PLC0415

    if not reason:
        return parts.find_model(config)
    try:
        found = parts.find_model(config)
    except ModelLoadError as error:
        raise ModelLoadError(f"{reason}; nor can transformers' code compute it: {error}") from error
    _log.warning("the model is computed by transformers' code, since it has no entry of ours: %s", reason)
    return found


def is_bidirectional(model: ModelFacts) -> bool:
    return isinstance(model, ModelConfig) and model.bidirectional


def why_no_text(model: ModelFacts) -> str:
    if is_bidirectional(model):
        return "its attention is bidirectional"
    if isinstance(model, ModelConfig) and model.headless:
        return "its checkpoint is of a model without a head for tokens"
    return ""


def _for_whole_prompts(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """The settings under which the scheduler gives every prompt one step, and computes all of it. Raises ConfigError.

    A prompt enters when the step has room for `min_chunk` of its tokens, or all of them, and that is then the longest.
    """
    if resolve_device(config.device).type != "cpu":
        raise ConfigError(
            f"device={config.device}: the bidirectional attention of {model.architecture} is computed on a CPU only;"
            " set device to cpu"
        )
    limits, longest = config.limits, config.max_model_len or model.max_position_embeddings
    step = max(limits.max_num_batched_tokens, longest + limits.max_num_seqs)
    limits = replace(
        limits, enable_prefix_caching=False, max_num_batched_tokens=step, prefill_chunk=longest, min_chunk=longest
    )
    return replace(config, limits=limits)
