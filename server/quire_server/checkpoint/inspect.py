"""Explains why a file, directory or repository is not a checkpoint that can be served.

Promises: common other formats are called by their names, with an alternative. Must not know: HTTP, torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path

from quire_engine.config import ARCHITECTURES, ModelImplementation, entry_of
from quire_engine.errors import ModelLoadError

_GGUF = "GGUF files are not read; use the repository with the same model as safetensors"
_MOST = 64 << 20  # maximum size of a config.json, in bytes


def check_name(name: str, path: Path) -> None:
    """Raises ModelLoadError for a name of a known other format that is neither a directory nor a repository."""
    if path.suffix.lower() == ".gguf" or re.fullmatch(r"[\w.-]+/[\w.-]+:[\w.]+", name):
        raise ModelLoadError(f"{name}: {_GGUF}")
    if path.is_file():
        raise ModelLoadError(
            f"{name}: a file; name the directory of the checkpoint, with config.json and tokenizer.json"
        )


def check_checkpoint(folder: Path, model_impl: ModelImplementation = "auto") -> None:
    """Raises ModelLoadError for a directory that is not a checkpoint that can be served.

    Architectures that have no entry of ours are left to the engine, except with "native".
    """
    names = {path.name for path in folder.iterdir()}
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
        (".gguf" in ends, _GGUF),
        (
            "adapter_config.json" in names,
            "an adapter (LoRA), not a model; merge it into its model and serve the result",
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
        if not config.is_file() or config.stat().st_size > _MOST:
            return None
        values = json.loads(config.read_bytes())
        (name,) = values["architectures"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return name if isinstance(name, str) else None
