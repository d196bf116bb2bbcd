"""Explains why a file, directory or repository is not a checkpoint that can be served.

Promises: common other formats are called by their names, with an alternative. Must not know: HTTP, torch.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from quire_engine.contract.config import ARCHITECTURES, ModelImplementation, entry_of
from quire_engine.contract.errors import ModelLoadError
from quire_engine.plain_files import is_plain, read_plain
from quire_server.checkpoint.gguf_folder import SUFFIX, listed, models

_GGUF = "it has GGUF files; add a colon and what the name of one of them ends with, such as :Q4_K_M; there are"
_MOST = 64 << 20  # maximum size of a config.json, in bytes


def check_name(name: str, path: Path) -> None:
    """Raises ModelLoadError for a name of a known other format that is neither a directory nor a repository."""
    if path.suffix.lower() == SUFFIX:
        raise ModelLoadError(f"{name}: there is no such GGUF file")
    if is_plain(path):
        raise ModelLoadError(
            f"{name}: a file; name the directory of the checkpoint, with config.json and tokenizer.json"
        )


def check_checkpoint(folder: Path, model_impl: ModelImplementation = "auto") -> None:
    """Raises ModelLoadError for a directory that is not a checkpoint that can be served.

    Architectures that have no entry of ours are left to the engine, except with "native".
    """
    names = {path.name for path in folder.iterdir()}
    if "config.json" in names and models(names) and not any(name.endswith(".safetensors") for name in names):
        if model_impl == "transformers":
            raise ModelLoadError(
                "GGUF files are computed by entries of ours, not by transformers; set model_impl to auto"
            )
        return  # `unfolded` has checked them
    if reason := trouble_of_files(names):
        raise ModelLoadError(f"{folder}: {reason}")
    architecture = _architecture(folder / "config.json")
    if model_impl == "native" and architecture is not None and entry_of(architecture) not in ARCHITECTURES:
        raise ModelLoadError(
            f"{folder}: models of architecture {architecture} have no entry of ours; those are"
            f" {', '.join(ARCHITECTURES)}; set model_impl to auto to have it computed by transformers"
        )


def trouble_of_files(names: Collection[str]) -> str:
    """Why these files are not a safetensors checkpoint; empty if they are one."""
    ends = {Path(name).suffix.lower() for name in names}
    if "config.json" in names and ".safetensors" in ends:
        return ""
    troubles = (
        (SUFFIX in ends, f"{_GGUF} {listed(models(names))}"),
        (
            "adapter_config.json" in names,
            "an adapter (LoRA), not a model; serve its model with --enable-lora --lora-modules name=directory",
        ),
        ("config.json" not in names, "not a checkpoint as transformers saves it: config.json: the file is missing"),
        (
            bool({".bin", ".pt", ".pth"} & ends),
            "the weights are pickled, which can run code; convert them to safetensors",
        ),
        (True, "there are no weights: no file ends with .safetensors"),
    )
    return next(reason for holds, reason in troubles if holds)


def _architecture(config: Path) -> str | None:
    """The architecture named in config.json; None if the engine's own message is more precise."""
    try:
        values = json.loads(read_plain(config, _MOST))
        (name,) = values["architectures"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return name if isinstance(name, str) else None
