"""Downloads checkpoints from the Hugging Face Hub with its own library: its cache, its variables, its progress bars.

Promises: a repository that is complete in the cache is used without network access; only files that are read are
downloaded; every failure is one line with a remedy.
"""

from __future__ import annotations

import errno
import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants, errors

from quire_engine.contract.errors import ModelLoadError
from quire_engine.gguf import shards
from quire_engine.plain_files import read_plain
from quire_server.checkpoint.gguf_folder import TOKENIZER_FILES, listed, models, of_quantisation, shard_names
from quire_server.checkpoint.inspect import trouble_of_files

_TEMPLATES = "additional_chat_templates/*.jinja"
_TEXT = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.*",
    _TEMPLATES,
)
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
# Other layouts of the same weights, and what belongs to them.
_NOT = ("*/*.safetensors", "*/*.json", "*/chat_template.*", "consolidated*")
_SPARE = 64 << 20  # bytes that a download leaves free

log = logging.getLogger("quire")


def snapshot(name: str, *, revision: str | None, cache: Path | None, weights: bool) -> Path:
    """The directory with a repository's files, of a branch, tag or commit. Raises ModelLoadError."""
    wanted = (*_TEXT, *_WEIGHTS) if weights else _TEXT
    folder = _cached(name, revision, cache, wanted, weights=weights)
    if folder is not None:
        log.info("%s: in the cache, %s", name, folder)
        return folder
    where = cache or Path(constants.HF_HUB_CACHE)
    if constants.HF_HUB_OFFLINE:
        raise ModelLoadError(
            f"{name}: not in the cache at {where}, and HF_HUB_OFFLINE is set; download it where there is a network,"
            f" or name a directory"
        )
    with _naming(name, revision, where):
        files = _listing(name, revision)
        if weights and (reason := trouble_of_files([file for file in files if "/" not in file])):
            raise ModelLoadError(f"{name}: {reason}")
        if "tokenizer.json" not in files:
            raise ModelLoadError(f"{name}: there is no tokenizer.json in this repository, the only kind that is read")
        _announce(files, name, where, wanted)
        return _download(name, revision, cache, wanted)


def gguf_file(name: str, tag: str, *, revision: str | None, cache: Path | None) -> Path:
    """The GGUF file of a repository whose name has this tag, such as Q4_K_M; the first, where a model is split.

    Raises ModelLoadError.
    """
    folder = _snapshot(name, revision, cache, ("no file at all",))
    if folder is not None:
        found = of_quantisation((path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")), tag)
        if len(found) == 1 and all(path.is_file() for path in shards(folder / found[0])):
            log.info("%s:%s: in the cache, %s", name, tag, folder / found[0])
            return folder / found[0]
    where = cache or Path(constants.HF_HUB_CACHE)
    if constants.HF_HUB_OFFLINE:
        raise ModelLoadError(
            f"{name}:{tag}: not in the cache at {where}, and HF_HUB_OFFLINE is set; download it where there is a"
            " network, or name a file"
        )
    with _naming(name, revision, where):
        files = _listing(name, revision)
        found = of_quantisation(files, tag)
        if len(found) != 1:
            several = f"{len(found)} GGUF files have" if found else "no GGUF file has"
            raise ModelLoadError(f"{name}: {several} {tag} in the name; there are {listed(found or models(files))}")
        wanted = (*shard_names(found[0], files), *TOKENIZER_FILES, _TEMPLATES)
        _announce(files, name, where, wanted)
        return _download(name, revision, cache, wanted) / found[0]


def _listing(name: str, revision: str | None) -> dict[str, int]:
    """The files of a repository and their bytes."""
    info = huggingface_hub.HfApi(library_name="quire").model_info(name, revision=revision, files_metadata=True)
    return {file.rfilename: file.size or 0 for file in info.siblings or ()}


def _download(name: str, revision: str | None, cache: Path | None, wanted: tuple[str, ...]) -> Path:
    path = huggingface_hub.snapshot_download(
        name,
        revision=revision,
        cache_dir=cache,
        library_name="quire",
        allow_patterns=list(wanted),
        ignore_patterns=_ignored(wanted),
    )
    return Path(str(path))


def _ignored(wanted: tuple[str, ...]) -> list[str]:
    """Files in folders are other layouts of the same weights, unless they are asked for by their names."""
    return [] if any("/" in each and each != _TEMPLATES for each in wanted) else list(_NOT)


@contextmanager
def _naming(name: str, revision: str | None, where: Path) -> Iterator[None]:
    """Every failure becomes one line that names the repository."""
    try:
        yield
    except ModelLoadError:
        raise
    except Exception as error:  # errors of the library, of several HTTP clients, and of the system
        raise ModelLoadError(f"{name}: {_reason(error, name, revision, where)}") from None


def _cached(
    name: str, revision: str | None, cache: Path | None, wanted: tuple[str, ...], *, weights: bool
) -> Path | None:
    """The directory in the cache, if it holds all files that are needed."""
    folder = _snapshot(name, revision, cache, wanted)
    return folder if folder is not None and _is_complete(folder, weights=weights) else None


def _snapshot(name: str, revision: str | None, cache: Path | None, wanted: tuple[str, ...]) -> Path | None:
    """The directory in the cache; None: there is none, or files are missing that the repository has."""
    try:
        path = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            cache_dir=cache,
            local_files_only=True,
            allow_patterns=list(wanted),
            ignore_patterns=_ignored(wanted),
        )
    except errors.HFValidationError:
        raise ModelLoadError(f"{name}: that cannot be a name on the Hugging Face Hub") from None
    except (OSError, ValueError):  # missing or incomplete
        return None
    return Path(str(path))


def _is_complete(folder: Path, *, weights: bool) -> bool:
    """Whether no download was interrupted; older versions of the library cannot tell."""
    if not (folder / "tokenizer.json").is_file():
        return False
    if not weights:
        return True
    if not (folder / "config.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(path.is_file() for path in folder.glob("*.safetensors"))
    try:
        named = set(json.loads(read_plain(index))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return False
    return all((folder / str(file)).is_file() for file in named)


def _announce(files: Mapping[str, int], name: str, where: Path, wanted: tuple[str, ...]) -> None:
    """Log what will be downloaded. Raises ModelLoadError for too little disk space."""
    ignored = _ignored(wanted)
    taken = {
        file: size
        for file, size in files.items()
        if any(fnmatch(file, pattern) for pattern in wanted) and not any(fnmatch(file, pattern) for pattern in ignored)
    }
    total = sum(taken.values())
    free = shutil.disk_usage(next(path for path in (where, *where.absolute().parents) if path.exists())).free
    missing = total - _already_there(where, name)
    if missing + _SPARE > free:
        raise ModelLoadError(
            f"{name}: {missing / 2**30:.1f} GiB are to be downloaded to {where}, where {free / 2**30:.1f} GiB are free;"
            " make room, or name another place with --download-dir"
        )
    log.info("%s: downloading %d files, %.2f GiB, to %s", name, len(taken), total / 2**30, where)


def _already_there(where: Path, name: str) -> int:
    """Bytes of earlier downloads, including incomplete files."""
    blobs = where / ("models--" + name.replace("/", "--")) / "blobs"
    return sum(path.stat().st_size for path in blobs.glob("*")) if blobs.is_dir() else 0


def _reason(error: Exception, name: str, revision: str | None, where: Path) -> str:
    hub = constants.ENDPOINT
    reasons: tuple[tuple[type[Exception], str], ...] = (
        (
            errors.GatedRepoError,
            f"gated: accept its terms at {hub}/{name}, then set HF_TOKEN to a token of your account",
        ),
        (
            errors.RevisionNotFoundError,
            f"there is no revision {revision!r} of it at {hub}; --revision names a branch, a tag or a commit",
        ),
        (errors.RepositoryNotFoundError, f"there is no such model at {hub}, or it is private and needs HF_TOKEN"),
        (PermissionError, f"{where} cannot be written; name another place with --download-dir"),
    )
    for kind, reason in reasons:
        if isinstance(error, kind):
            return reason
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        advice = "check HF_TOKEN" if status in (401, 403) else "try again later"
        return f"{hub} answers {status}; {advice}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"there is no space left at {where}; make room, or name another place with --download-dir"
    text = " ".join(str(error).split())[:200]
    return f"not in the cache at {where}, and {hub} cannot be reached: {type(error).__name__}: {text}"
