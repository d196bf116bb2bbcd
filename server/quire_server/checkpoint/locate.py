"""Resolves a model's name to the directory of its checkpoint: local, cached or downloaded.

Promises: the returned settings name directories; a name that cannot be served leads to one line that explains why. Must
not know: HTTP, torch.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from quire_engine.config import draft_model, eagle_head
from quire_engine.demo import demo_model_path
from quire_engine.errors import ModelLoadError
from quire_server.checkpoint.inspect import check_checkpoint, check_name
from quire_server.settings import DEMO_MODEL, Settings

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_PAGE = re.compile(r"https?://(huggingface\.co|hf\.co)/")


def localized(settings: Settings) -> Settings:
    """The settings with directories for model, tokenizer and draft model; repositories of a hub are downloaded.

    The served model name stays the repository's name. Raises ModelLoadError.
    """
    changed: dict[str, object] = {}
    where = (settings.revision, settings.download_dir)
    if settings.model != DEMO_MODEL:
        name = _PAGE.sub("", settings.model)
        folder = checkpoint_directory(name, *where)
        check_checkpoint(folder, settings.model_impl)
        if not Path(settings.model).is_dir():
            names = settings.served_model_name or tuple(dict.fromkeys((name, settings.model)))
            changed = {"model": str(folder), "served_model_name": names}
    if settings.tokenizer is not None and not Path(settings.tokenizer).is_dir():
        folder = checkpoint_directory(settings.tokenizer, *where, setting="--tokenizer", weights=False)
        changed["tokenizer"] = str(folder)
    if draft := draft_model(settings.speculation):
        folder = (
            demo_model_path()
            if draft == DEMO_MODEL
            else checkpoint_directory(draft, None, settings.download_dir, setting="--speculation")
        )
        check_checkpoint(folder, settings.model_impl)
        changed["speculation"] = f"model:{folder}"
    if head := eagle_head(settings.speculation):
        folder = checkpoint_directory(head, None, settings.download_dir, setting="--speculation")
        changed["speculation"] = f"eagle:{folder}"
    return settings.model_copy(update=changed) if changed else settings


def checkpoint_directory(
    name: str,
    revision: str | None = None,
    download_dir: Path | None = None,
    *,
    setting: str = "--model",
    weights: bool = True,
) -> Path:
    """The local directory of that name, or a repository from the cache or the hub.

    Raises ModelLoadError.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    check_name(name, path)
    if not _HUB_ID.fullmatch(name):
        raise ModelLoadError(
            f"{setting} {name}: there is no such directory, and it is no name on the Hugging Face Hub, such as"
            " Qwen/Qwen3-0.6B"
        )
    hub = cast(
        _Hub, import_module("quire_server.checkpoint.hub")
    )  # the import takes half a second; a local directory does not need it
    return hub.snapshot(name, revision=revision, cache=download_dir, weights=weights)


class _Hub(Protocol):
    """`quire_server.checkpoint.hub`, imported when a repository is needed."""

    def snapshot(self, name: str, *, revision: str | None, cache: Path | None, weights: bool) -> Path:
        """The directory with the files of a repository."""
        ...
