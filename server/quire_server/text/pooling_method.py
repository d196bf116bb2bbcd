"""The pooling method for embeddings: the operator's setting, else the checkpoint's own.

Promises: if a checkpoint needs a method that this server does not compute, it serves no embeddings, since others than
the model's own would be useless. Must not know: requests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from quire_engine.contract.errors import ModelLoadError
from quire_engine.plain_files import read_plain
from quire_server.text.matrices import Projection

PoolingChoice = Literal["auto", "last", "mean", "yes-no", "none"]

_MODULES = "modules.json"  # of sentence-transformers: the list of modules
_PROMPTS = "config_sentence_transformers.json"
_MODES = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean", "last": "last"}
_PREFIX = "pooling_mode_"
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingMethod:
    """The pooling method of this server."""

    name: Literal["last", "mean", "none"]
    reason: str = ""  # for "none": the reason for clients
    projections: tuple[Projection, ...] = ()  # what the pooled row passes through
    normalizes: bool = True  # whether vectors have length 1 where a request does not say
    prompts: Mapping[str, str] = field(default_factory=dict)  # texts before a client's, by name
    default_prompt: str = ""  # the text before those of requests that name none

    def project(self, values: Sequence[float]) -> Sequence[float]:
        """The pooled row after the checkpoint's dense modules."""
        for projection in self.projections:
            values = projection.apply(values)
        return values

    def size(self, hidden_size: int) -> int:
        """The length of a vector."""
        return self.projections[-1].size if self.projections else hidden_size


def pooling_method(asked: PoolingChoice, model: Path) -> PoolingMethod:
    """`auto` follows the files of sentence-transformers in the checkpoint, and is the last row without them."""
    if asked == "none":
        return PoolingMethod(name="none", reason="it was started with --pooling none")
    if asked == "yes-no":
        return PoolingMethod(name="none", reason="it was started with --pooling yes-no, to score pairs")
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
    projections: list[Projection] = []
    normalizes = False
    for module in modules:
        kind = str(module.get("type", "")).rsplit(".", 1)[-1] if isinstance(module, Mapping) else ""
        normalizes = normalizes or kind == "Normalize"
        folder = (model / str(module.get("path", "")) if isinstance(module, Mapping) else model).resolve()
        if not folder.is_relative_to(model.resolve()):
            raise ValueError("a module's path leads out of the checkpoint")
        if kind == "Pooling":
            modes = _modes(_read(folder / "config.json"))
            if modes not in (["last"], ["mean"]):
                asked = ", ".join(modes) or "none"
                return PoolingMethod(name="none", reason=f"the model's way to pool ({asked}) is not supported")
            name = "mean" if modes == ["mean"] else "last"
        elif kind == "Dense":
            try:
                projections.append(_projection(folder))
            except (OSError, ValueError, RecursionError, ModelLoadError):
                reason = "the model's module Dense cannot be read, or has an activation that is not supported"
                return PoolingMethod(name="none", reason=reason)
        elif kind not in {"Transformer", "Normalize"}:
            return PoolingMethod(name="none", reason=f"the model's module {kind[:40]!r} is not supported")
    prompts, default = _prompts(model / _PROMPTS)
    return PoolingMethod(
        name=name,
        projections=tuple(projections),
        normalizes=normalizes,
        prompts=prompts,
        default_prompt=prompts.get(default, ""),
    )


def _projection(folder: Path) -> Projection:
    """A dense module. Raises ValueError for an activation that is not computed here."""
    config = _read(folder / "config.json")
    named = config.get("activation_function") if isinstance(config, Mapping) else None
    activation = "Tanh" if named is None else str(named).rsplit(".", 1)[-1]
    if activation not in ("Identity", "Tanh"):
        raise ValueError(f"the activation {activation[:40]!r} is not supported")
    return Projection.read(folder, "linear", is_tanh=activation == "Tanh")


def _prompts(file: Path) -> tuple[dict[str, str], str]:
    """The prompts by name, and the default one's name."""
    config = _read(file) if file.is_file() else {}
    given = config.get("prompts") if isinstance(config, Mapping) else None
    prompts = {str(name): text for name, text in given.items() if isinstance(text, str)} if given else {}
    return prompts, str(config.get("default_prompt_name") or "") if isinstance(config, Mapping) else ""


def _modes(config: object) -> list[str]:
    """The pooling modes that a module's configuration turns on; several would be concatenated."""
    if not isinstance(config, Mapping):
        raise ValueError("a module's configuration is no object")
    listed = config.get("pooling_mode")
    names = [listed] if isinstance(listed, str) else listed if isinstance(listed, list) else []
    names = names or [key.removeprefix(_PREFIX) for key in config if key.startswith(_PREFIX) and config[key] is True]
    return [_MODES.get(str(name), str(name)[:40]) for name in names]


def _read(file: Path) -> object:
    return json.loads(read_plain(file, _MAX_BYTES))
