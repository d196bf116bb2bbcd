"""The pooling method for embeddings: the operator's setting, else the checkpoint's own.

Promises: if a checkpoint needs a method that this server does not compute, it serves no embeddings, since others than
the model's own would be useless. Must not know: requests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PoolingChoice = Literal["auto", "last", "mean", "none"]

_MODULES = "modules.json"  # of sentence-transformers: the list of modules
_MODES = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean", "last": "last"}
_PREFIX = "pooling_mode_"
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingMethod:
    """The pooling method of this server."""

    name: Literal["last", "mean", "none"]
    reason: str = ""  # for "none": the reason for clients


def pooling_method(asked: PoolingChoice, model: Path) -> PoolingMethod:
    """`auto` follows the files of sentence-transformers in the checkpoint, and is the last row without them."""
    if asked == "none":
        return PoolingMethod(name="none", reason="it was started with --pooling none")
    if asked != "auto":
        return PoolingMethod(name=asked)
    if not (model / _MODULES).is_file():
        return PoolingMethod(name="last")
    try:
        return _of_modules(model, _read(model / _MODULES))
    except (OSError, ValueError, RecursionError):
        return PoolingMethod(name="none", reason=f"the model's {_MODULES} or a file it names cannot be read")


def _of_modules(model: Path, modules: object) -> PoolingMethod:
    if not isinstance(modules, list):
        raise ValueError(f"{_MODULES} is no list")
    name: Literal["last", "mean"] = "last"
    for module in modules:
        kind = str(module.get("type", "")).rsplit(".", 1)[-1] if isinstance(module, Mapping) else ""
        if kind == "Pooling":
            folder = (model / str(module.get("path", ""))).resolve()
            if not folder.is_relative_to(model.resolve()):
                raise ValueError("a module's path leads out of the checkpoint")
            modes = _modes(_read(folder / "config.json"))
            if modes not in (["last"], ["mean"]):
                asked = ", ".join(modes) or "none"
                return PoolingMethod(name="none", reason=f"the model's way to pool ({asked}) is not supported")
            name = "mean" if modes == ["mean"] else "last"
        elif kind not in {"Transformer", "Normalize"}:
            return PoolingMethod(name="none", reason=f"the model's module {kind[:40]!r} is not supported")
    return PoolingMethod(name=name)


def _modes(config: object) -> list[str]:
    """The pooling modes that a module's configuration turns on; several would be concatenated."""
    if not isinstance(config, Mapping):
        raise ValueError("a module's configuration is no object")
    listed = config.get("pooling_mode")
    names = [listed] if isinstance(listed, str) else listed if isinstance(listed, list) else []
    names = names or [key.removeprefix(_PREFIX) for key in config if key.startswith(_PREFIX) and config[key] is True]
    return [_MODES.get(str(name), str(name)[:40]) for name in names]


def _read(file: Path) -> object:
    if file.stat().st_size > _MAX_BYTES:
        raise ValueError(f"{file.name} is too large")
    return json.loads(file.read_text(encoding="utf-8"))
