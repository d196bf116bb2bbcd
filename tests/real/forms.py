"""A trained model's weights in each of their forms on a CPU, and a scheduler for each way to serve them.

Promises: all ways share the weights of one `build`; each has a scheduler, and so a prefix cache, of its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quire_engine.build import BuiltEngine, build
from quire_engine.contract.types import GenerationRequest
from quire_engine.execution.drafting.suffix import SuffixDrafter
from quire_engine.execution.models.checkpoint import open_checkpoint
from quire_engine.execution.models.config import load_model_config
from quire_engine.execution.models.weights import take_text
from quire_engine.scheduling.scheduler import Scheduler
from quire_engine.scheduling.speculation import Speculation
from support.limits import engine_config

FORMS = ("stored", "bf16", "int8", "int4")
_ENGINE = {"device": "cpu", "kernels": "cpu", "num_threads": 2, "max_model_len": 1024, "kv_memory": 128 << 20}


def built_as(form: str, model: Path, folder: Path) -> BuiltEngine:
    """An engine of an unfolded GGUF file; `folder` keeps packed weights and the decoded model."""
    if form == "bf16":
        model = decoded(model, folder / f"{model.name}-bf16")
    quantization = form if form in {"int8", "int4"} else None
    return build(
        engine_config(
            model=str(model),
            quantization=quantization,
            packed_cache_dir=str(folder),
            enable_prefix_caching=True,
            **_ENGINE,
        )
    )


def decoded(model: Path, folder: Path) -> Path:
    """A checkpoint of the file's numbers in bfloat16."""
    folder.mkdir(exist_ok=True)
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    del config["quantization_config"]  # which says how the file's own numbers lie
    (folder / "config.json").write_text(json.dumps(config))
    with open_checkpoint(model) as checkpoint:
        take_text(checkpoint, load_model_config(model))
        tensors = {name: checkpoint.tensor(name).to(torch.bfloat16) for name in checkpoint.names}
    save_file(tensors, str(folder / "model.safetensors"))
    return folder


def rescheduled(built: BuiltEngine, *, speculates: bool = False, num_blocks: int = 0, **limits: int) -> BuiltEngine:
    """The same weights under a scheduler of its own: with guesses from earlier text, another pool, other limits."""
    plan = built.plan.scheduler
    config = replace(
        plan,
        speculates=speculates,
        num_blocks=num_blocks or plan.num_blocks,
        limits=replace(plan.limits, **limits),
    )
    speculate = partial(Speculation, SuffixDrafter()) if speculates else None
    return replace(built, scheduler=Scheduler(config, speculate=speculate))


def short_of_blocks(built: BuiltEngine, requests: Sequence[GenerationRequest]) -> BuiltEngine:
    """The same weights with a pool of 1.2 of the largest request."""
    largest = max(
        built.plan.scheduler.footprint(
            num_prompt=len(request.prompt_token_ids), max_new_tokens=request.stop.max_new_tokens, n=request.n
        )
        for request in requests
    )
    return rescheduled(built, num_blocks=int(1.2 * largest))
