"""Answers `{"config", "dtype", "verdict", "patience"}` with the verdict on this machine's GPU, as far as it goes.

Promises: faults of the device are findings; a configuration that cannot serve is left for the start to refuse.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from dataclasses import asdict, replace
from typing import Any

import torch

from quire_engine.contract.config import EngineConfig, engine_config
from quire_engine.contract.errors import ConfigError
from quire_engine.execution.gpu.device import CudaDevice, capture_on
from quire_engine.execution.kernel_checks import model_sizes, select_kernels
from quire_engine.execution.models.config import ModelConfig
from quire_engine.execution.models.found import find_model
from quire_engine.execution.progress import tell_nobody
from quire_engine.execution.proven_paths import asked_paths, without_paths
from quire_engine.execution.verdict import Verdict, verdict_of
from quire_engine.tools.json_child import converse
from quire_engine.tools.prover.work import Proof
from quire_engine.tools.prover.workers import Broken, Patience, Say, prove
from quire_kernels.triton_compilers import tell_compilers
from quire_kernels.verify.findings import Subject

DEVICE = torch.device("cuda")


def answers(questions: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One verdict for each question, or `broken`, which says why there is none."""
    for asked in questions:
        verdict = verdict_of(asked["verdict"])
        config = engine_config(asked["config"])
        worker, patience = Worker(config, getattr(torch, asked["dtype"])), Patience(**asked["patience"])
        try:
            prove(worker.work, verdict, patience, asked=asked_paths(config))
        except Broken as error:
            yield {"broken": str(error)}
        else:
            yield asdict(verdict)


class Worker:
    """The work of forked processes, which make all that needs the device by themselves."""

    def __init__(self, config: EngineConfig, dtype: torch.dtype) -> None:
        """Raises ConfigError, ModelLoadError."""
        self._config, self._dtype, self._found = config, dtype, find_model(config)

    def work(self, verdict: Verdict, say: Say) -> None:
        """See `Proof.work`."""
        facts = self._found.facts
        if not isinstance(facts, ModelConfig):
            raise ConfigError("only models that Quire computes by itself are checked")
        tell_compilers(lambda compiling: say({"compiling": compiling}))
        Proof(
            make=self._subject,
            capture=capture_on(lambda: CudaDevice(DEVICE)),
            sizes=model_sizes(facts, self._config.limits.block_size),
            asked=asked_paths(self._config),
        ).work(verdict, say)

    def _subject(self, left_out: Collection[str]) -> Subject:
        config = without_paths(replace(self._config, left_out_paths=tuple(left_out)))
        return Subject(
            kernels=select_kernels(config, self._found, DEVICE, self._dtype, 1, tell_nobody, None),
            device=DEVICE,
            dtype=self._dtype,
            quantization=config.quantization,
            kv_type=config.kv_cache_dtype,
            alone=config.deterministic,
        )


def main() -> int:
    """Answer the questions on stdin; return the exit code."""
    return converse(answers)


if __name__ == "__main__":
    sys.exit(main())
