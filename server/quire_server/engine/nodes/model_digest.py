"""A name of a model's files that is the same on all machines, unlike that of their times and places on one disk.

It covers names, sizes, configuration and tokenizer whole, and of the weights their headers and samples all over them:
reading hundreds of gigabytes would take longer than loading them. Two models that were trained apart differ in it.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from quire_engine.plain_files import open_plain, read_plain

_WHOLE = ("config.json",)
_WEIGHTS = ("*.safetensors", "*.gguf")
_HEAD_BYTES = 1 << 20  # where the names, types and shapes of the tensors are
_SAMPLES, _SAMPLE_BYTES = 512, 1024  # of a file of weights, at even distances


def model_digest(folder: Path) -> str:
    """64 hexadecimal digits. Raises OSError for files that cannot be read."""
    digest = sha256()
    for name in _WHOLE:
        digest.update(_of_whole(folder / name))
    for file in sorted(file for pattern in _WEIGHTS for file in folder.glob(pattern)):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with open_plain(file) as weights:
            digest.update(weights.read(_HEAD_BYTES))
            for sample in range(_SAMPLES + 1):
                weights.seek(max(0, size - _SAMPLE_BYTES) * sample // _SAMPLES)
                digest.update(weights.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def tokenizer_digest(folder: Path) -> str:
    """Return the SHA-256 digest of tokenizer.json in hexadecimal digits; empty where there is no such file."""
    file = folder / "tokenizer.json"
    return sha256(read_plain(file)).hexdigest() if file.is_file() else ""


def numerics_name(arithmetic: str, model: str) -> str:
    """The name of what bits depend on: `IdentityPart.arithmetic`, and the model by its digest."""
    return sha256(f"{arithmetic} {model}".encode()).hexdigest()


def _of_whole(file: Path) -> bytes:
    return sha256(read_plain(file)).digest() if file.is_file() else b""
