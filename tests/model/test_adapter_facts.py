"""Adapters read by a process beside the engines: the very facts that an engine finds, and refusals by name."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from quire_engine.contract.config import EngineConfig
from quire_engine.contract.errors import ModelLoadError
from quire_engine.contract.types import AdapterFacts
from quire_engine.execution.models.adapter import read_adapter
from quire_engine.execution.models.config import load_model_config
from quire_engine.tools.adapter_facts import answers
from quire_server.engine import adapters as served
from quire_server.engine.adapters import AdapterFiles
from support.adapters import write_adapter
from support.checkpoints import make_checkpoint


def test_one_process_reads_the_adapters_of_several_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = [make_checkpoint(tmp_path / name, dtype="bfloat16") for name in ("one", "two")]
    adapters = [write_adapter(tmp_path / f"a{seed}", checkpoints[0], seed=seed, rank=2 + seed) for seed in range(3)]
    configs = [EngineConfig(model=str(model), enable_lora=True) for model in checkpoints]
    files = AdapterFiles()
    wanted = [(configs[0], str(adapters[0])), (configs[1], str(adapters[1])), (configs[1], str(adapters[2]))]
    asyncio.run(files.read_ahead(wanted))
    with monkeypatch.context() as patch:  # what was read ahead is not read again
        patch.setattr(served, "ask_each", None)
        facts = [asyncio.run(files.read(*each)) for each in wanted]
    for (config, path), found in zip(wanted, facts, strict=True):
        read = read_adapter(Path(path), load_model_config(Path(config.model)), max_rank=16)
        assert found == AdapterFacts(digest=read.digest, rank=read.rank)
    for wrong, folder, told in (
        (replace(configs[0], max_lora_rank=2), adapters[2], "rank"),
        (replace(configs[0], enable_lora=False), adapters[0], "adapters are not enabled"),
    ):
        with pytest.raises(ModelLoadError, match=told):  # as the process refuses it
            list(answers(iter([{"config": asdict(wrong), "path": str(folder)}])))
