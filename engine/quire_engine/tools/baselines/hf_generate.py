"""transformers' `generate` on static batches: `python -m quire_engine.tools.baselines.hf_generate`.

Promises: the checkpoint, dtype and device that the engine would use; left-padded prompts, greedy sampling, no early
end. Must not know: kernels.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor

from quire_engine.contract.config import EngineConfig
from quire_engine.execution.models.config import load_model_config
from quire_engine.tools.baselines.batches import Member, RunBatch, Times, answer


class GenerativeModel(Protocol):
    """The part of a transformers model that is used here."""

    @property
    def device(self) -> torch.device: ...

    def generate(self, **options: object) -> Tensor: ...


class StepClock:
    """A transformers streamer that records the time of each step's tokens."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._has_prompt = False
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Called with the prompts first, then with one token of each member."""
        del value
        if self._has_prompt:
            self.times.append(time.perf_counter() - self._started)
        self._has_prompt = True

    def end(self) -> None:
        """Required by the interface; nothing is buffered."""


def load(config: EngineConfig) -> RunBatch:
    """Load the model; returns the function that runs a batch. Raises ModelLoadError, ImportError."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - optional

    path = Path(config.model)
    files = [] if any(path.glob("*.safetensors")) else sorted(path.glob("*.gguf"))  # as the server chooses
    if files and find_spec("accelerate") is None:
        raise ImportError("transformers reads a GGUF file with the library accelerate only: pip install accelerate")
    dtype: str = config.dtype
    if dtype == "auto":  # transformers computes no stored format: it makes a GGUF file's numbers float32
        dtype = "float32" if files else load_model_config(path, config.ignore_config_keys).dtype
    device = "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    named = {"gguf_file": files[0].name} if files else {}
    model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, **named)
    torch.nn.Module.to(model, device=device, dtype=getattr(torch, dtype))
    return partial(run_batch, cast(GenerativeModel, model))


def run_batch(model: GenerativeModel, members: Sequence[Member]) -> Times:
    """Run all members until the longest ends; report times only for tokens that a member asked for."""
    width = max(len(member.prompt) for member in members)
    longest = max(member.output_tokens for member in members)
    ids = torch.zeros(len(members), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    clock = StepClock()
    for row, member in enumerate(members):
        ids[row, width - len(member.prompt) :] = torch.tensor(member.prompt)
        mask[row, width - len(member.prompt) :] = 1
    with torch.inference_mode():
        model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            do_sample=False,
            min_new_tokens=longest,
            max_new_tokens=longest,
            pad_token_id=0,
            streamer=clock,
        )
    return [clock.times[: member.output_tokens] for member in members]


if __name__ == "__main__":
    sys.exit(answer(load))
