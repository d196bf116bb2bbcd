"""Resolves a model's name to the directory of its checkpoint: local, cached, downloaded, or made for a GGUF file.

Promises: the returned settings name directories; a name that cannot be served leads to one line that explains why. Must
not know: HTTP, torch.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from quire_engine.contract.config import ModelImplementation, draft_model
from quire_engine.contract.errors import ModelLoadError
from quire_engine.demo import demo_model_path
from quire_engine.gguf import typed_name
from quire_engine.plain_files import is_plain
from quire_server.checkpoint.gguf_folder import gguf_of, is_gguf, models, short_name, unfolded
from quire_server.checkpoint.inspect import check_checkpoint, check_name
from quire_server.checkpoint.trained import located
from quire_server.settings import DEMO_MODEL, Settings

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILE = re.compile(rf"(?P<name>{_HUB_ID.pattern}):(?P<tag>[\w.-]+)")  # of a repository of GGUF files
_TYPE = re.compile(r"[-._](?:I?Q\d\w*|B?F16|F32|MXFP4\w*)$", re.IGNORECASE)  # of weights, at the end of a file's name
_OLLAMA_NAME = re.compile(r"[a-z][a-z0-9.-]*(:[\w.-]+)?")  # such as llama3.2:1b
_PAGE = re.compile(r"https?://(huggingface\.co|hf\.co)/")


def localized(settings: Settings) -> Settings:
    """The settings with directories for model, tokenizer and draft model; repositories of a hub are downloaded.

    The listed name stays the repository's or the file's. Raises ModelLoadError.
    """
    changed: dict[str, object] = {}
    where = (settings.revision, settings.download_dir)
    if settings.model != DEMO_MODEL:
        name = _PAGE.sub("", settings.model)
        computes = (
            not settings.engines
        )  # else nodes have the weights, and tokenizer and templates are all that it takes
        folder = checkpoint_directory(name, *where, tokenizer=settings.tokenizer is None, weights=computes)
        if computes:
            check_checkpoint(folder, settings.model_impl)
        if folder != Path(settings.model):
            names = settings.served_model_name or (_own_name(name),)
            changed = {"model": str(folder), "served_model_name": names}
    if settings.tokenizer is not None and not os.path.isdir(settings.tokenizer):
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
    return settings.model_copy(update=changed) if changed else settings


def check_location(name: str, model_impl: ModelImplementation, setting: str = "--model") -> str | None:
    """Look at a model's name without a download; a line for a name that only a hub can tell more of.

    Raises ModelLoadError for a name that cannot be a model's, and for a directory whose files cannot be served.
    """
    name = located(_PAGE.sub("", name))
    path = Path(name).expanduser()
    if is_gguf(path) and is_plain(path):
        return None
    if os.path.isdir(path):
        if setting == "--model" and gguf_of(path) is None:
            check_checkpoint(path, model_impl)
        return None
    check_name(name, path)
    if _HUB_FILE.fullmatch(name) or _HUB_ID.fullmatch(name):
        return f"{setting} {name} is a name on the Hugging Face Hub, which was not asked"
    raise _no_model(setting, name)


def _no_model(setting: str, name: str) -> ModelLoadError:
    ollama = "; Ollama's library is not asked" if _OLLAMA_NAME.fullmatch(name) else ""
    return ModelLoadError(
        f"{setting} {name}: there is no such directory, and it is no name on the Hugging Face Hub, such as"
        f" Qwen/Qwen3-0.6B, or of a GGUF file there, such as Qwen/Qwen3-0.6B-GGUF:Q8_0{ollama}"
    )


def _own_name(name: str) -> str:
    """The name under which a model is served: a repository's, or that of the file or the directory."""
    path = Path(name).expanduser()
    if os.path.isdir(path):
        return path.resolve().name
    return short_name(path.name) if is_gguf(path) else name


def other_names(settings: Settings) -> tuple[str, ...]:
    """The names beside the listed one that requests may use for a located model: nobody needs to look one up.

    They are the name that was typed, a GGUF file's with and without its suffix and its type, and a repository's with
    and without its owner and tag. Names that the operator has chosen stand alone.
    """
    if settings.model == DEMO_MODEL:
        return ()
    folder = settings.model_path
    typed = typed_name(folder)
    listed = settings.model_names
    if not _HUB_ID.fullmatch(listed[0]) and listed != (_own_name(typed),):
        return ()
    files = models(os.listdir(folder)) if folder.is_dir() else []
    bare = [short_name(each) for each in files]
    repository = listed[0].partition(":")[0]
    found = (typed, *files, *bare, *(_TYPE.sub("", each) for each in bare), repository, repository.rpartition("/")[2])
    return tuple(name for name in dict.fromkeys(found) if name and name not in listed)


def checkpoint_directory(
    name: str,
    revision: str | None = None,
    download_dir: Path | None = None,
    *,
    setting: str = "--model",
    weights: bool = True,
    tokenizer: bool = True,
) -> Path:
    """The local directory of that name, or a repository from the cache or the hub; of a GGUF file one that was made.

    `tokenizer`: a GGUF file's is needed too. Raises ModelLoadError.
    """
    typed, name = name, located(name)
    path = Path(name).expanduser()
    if os.path.isdir(path):
        found = gguf_of(path)
        return path if found is None else unfolded(found, name=typed, tokenizer=tokenizer)
    if is_gguf(path):
        return unfolded(path, name=typed, tokenizer=tokenizer)
    if match := _HUB_FILE.fullmatch(name):
        from quire_server.checkpoint.hub import gguf_file  # noqa: PLC0415 - half a second, not for local files

        file = gguf_file(match["name"], match["tag"], revision=revision, cache=download_dir)
        return unfolded(file, name=typed, tokenizer=tokenizer)
    check_name(name, path)
    if not _HUB_ID.fullmatch(name):
        raise _no_model(setting, name)
    from quire_server.checkpoint.hub import snapshot  # noqa: PLC0415 - half a second, not for local files

    return snapshot(name, revision=revision, cache=download_dir, weights=weights)
