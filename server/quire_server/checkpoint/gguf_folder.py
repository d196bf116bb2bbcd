"""A GGUF file as the folder of a checkpoint: its configuration and tokenizer as files, and links to its weights.

Promises: what cannot be served is one line before anything is loaded; the folder goes when the process ends. Must not
know: torch.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path, PurePosixPath

from quire_engine.contract.errors import ModelLoadError
from quire_engine.gguf import SAMPLING_SOURCE, Metadata, keep_typed_name, read_gguf, shown
from quire_engine.plain_files import is_plain
from quire_server.checkpoint.gguf_config import check_types, config_of
from quire_server.checkpoint.gguf_tokenizer import GgufVocabulary

SUFFIX = ".gguf"
_FOLDER = "~/.cache/quire/gguf"
_LOCK = "lock"
# Files that win over what the GGUF file says, where they lie beside it.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    "additional_chat_templates",
)
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})", re.IGNORECASE)
_NOT_MODELS = ("mmproj", "imatrix")  # projectors of images and statistics, beside the models
_MOST_LISTED = 12
# Defaults of sampling, by their names in generation_config.json.
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}

# What llama.cpp samples by where neither a file nor a request says otherwise. Files of this format are made to be read
# with these: many small models write noise at temperature 1 without a filter.
_FORMAT_SAMPLING: dict[str, object] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}

log = logging.getLogger("quire")


def is_gguf(path: Path) -> bool:
    """Whether a path names such a file."""
    return path.suffix.lower() == SUFFIX and is_plain(path)


def gguf_of(folder: Path) -> Path | None:
    """The model of a directory that has GGUF files and no safetensors; None: it is no such directory.

    Raises ModelLoadError, naming them, where there are several.
    """
    names = [path.name for path in folder.iterdir()]
    if any(name.endswith(".safetensors") for name in names) or not any(map(_is_gguf_name, names)):
        return None
    found = models(names)
    if len(found) != 1:
        raise ModelLoadError(f"{folder}: {len(found)} models; name one file: {listed(found)}")
    return folder / found[0]


def models(names: Iterable[str]) -> list[str]:
    """Return the names of GGUF files that are models, sorted; of a split model only the first file."""
    found = []
    for name in sorted(names):
        stem = PurePosixPath(name).stem
        shard = _SHARD.fullmatch(stem)
        is_first = shard is None or int(shard["number"]) == 1
        if _is_gguf_name(name) and is_first and not any(word in stem.lower() for word in _NOT_MODELS):
            found.append(name)
    return found


def of_quantisation(names: Iterable[str], tag: str) -> list[str]:
    """Return the models whose name, or a folder in whose path, ends with a tag of a quantisation, such as Q4_K_M."""
    pattern = re.compile(rf"(?:.*[-._])?{re.escape(tag)}", re.IGNORECASE)
    return [name for name in models(names) if any(map(pattern.fullmatch, PurePosixPath(short_name(name)).parts))]


def short_name(name: str) -> str:
    """The name without what says which part of a split model it is."""
    stem = name[: -len(SUFFIX)]
    shard = _SHARD.fullmatch(stem)
    return stem if shard is None else shard["stem"]


def shard_names(first: str, names: Collection[str]) -> list[str]:
    """The files of a model, of which `first` is the first."""
    stem = short_name(first)
    if stem + SUFFIX == first:
        return [first]
    return sorted(name for name in names if _is_gguf_name(name) and short_name(name) == stem and name != stem + SUFFIX)


def listed(names: Collection[str]) -> str:
    shown = ", ".join(sorted(names)[:_MOST_LISTED])
    more = len(names) - _MOST_LISTED
    return shown if more <= 0 else f"{shown} and {more} more"


def unfolded(file: Path, *, name: str = "", tokenizer: bool = True) -> Path:
    """A temporary folder that is a checkpoint; `tokenizer`: with that of the file or the one beside it.

    `name`: what messages call it, as the user did; empty: the file's path. Raises ModelLoadError, naming the file and
    the key.
    """
    model = read_gguf(file)
    check_types(model)
    config = config_of(model)
    beside = [path for name in TOKENIZER_FILES if (path := file.parent / name).exists()]
    written: dict[str, object] = {}
    if not tokenizer or all(path.name != "tokenizer.json" for path in beside):
        beside = []
    if beside or not tokenizer:
        config["eos_token_id"] = _ends_beside(model.metadata)
    else:
        vocabulary = GgufVocabulary(model.metadata)
        if vocabulary.corrected:
            named = ", ".join(map(shown, vocabulary.corrected[:_MOST_LISTED]))
            log.warning("%s: stored as ordinary text and taken as control tokens, which they are: %s", file, named)
        special = vocabulary.special()
        config |= {"eos_token_id": list(special.end_ids), "bos_token_id": special.bos_id}
        written["tokenizer.json"] = vocabulary.tokenizer()
        written["tokenizer_config.json"] = special.config(config["max_position_embeddings"])
    written["config.json"] = config
    sampling = _sampling(model.metadata)
    source = "the file and llama.cpp" if sampling else "llama.cpp"
    written["generation_config.json"] = {**_FORMAT_SAMPLING, **sampling, SAMPLING_SOURCE: source}
    try:
        folder = _new_folder()
        keep_typed_name(folder, name or str(file))
        for each, value in written.items():
            (folder / each).write_text(json.dumps(value), encoding="utf-8")
        for path in [*model.files, *beside]:
            (folder / path.name).symlink_to(path.absolute())
    except OSError as error:
        raise ModelLoadError(f"{file}: its configuration cannot be kept: {error}") from error
    return folder


def _new_folder() -> Path:
    """A folder that goes when this process ends; what killed processes left goes now. Raises OSError."""
    try:  # a temporary folder is cleared of what is old, while a server runs for months
        parent = Path(_FOLDER).expanduser()
        parent.mkdir(parents=True, exist_ok=True)
        _remove_left(parent)
        folder = Path(tempfile.mkdtemp(prefix="", dir=parent))
    except (OSError, RuntimeError):  # no home, or none that can be written
        folder = Path(tempfile.mkdtemp(prefix="quire-gguf-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    # The lock ends with the process, however it ends. It gets its name when it is held.
    handle = os.open(folder / "new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    (folder / "new").rename(folder / _LOCK)
    return folder


def _remove_left(parent: Path) -> None:
    """Remove the folders of processes that are gone."""
    for lock in parent.glob(f"*/{_LOCK}"):
        with suppress(OSError), lock.open("rb") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)


def _ends_beside(metadata: Metadata) -> list[int]:
    """The ids that end a text, by a file whose tokenizer is not used; they hold beside those of the one that is."""
    if metadata.has("tokenizer.ggml.tokens"):
        return list(GgufVocabulary(metadata).end_ids())
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [metadata.raw(f"tokenizer.ggml.{key}") for key in keys]
    return list(dict.fromkeys(each for each in found if isinstance(each, int)))


def _sampling(metadata: Metadata) -> dict[str, object]:
    """Return the defaults of sampling that the file itself has."""
    found: dict[str, object] = {}
    for key, name in _SAMPLING.items():
        if metadata.has(f"general.sampling.{key}"):
            read = metadata.integer if name == "top_k" else metadata.number
            found[name] = read(f"general.sampling.{key}")
    return found


def _is_gguf_name(name: str) -> bool:
    return name.lower().endswith(SUFFIX)
