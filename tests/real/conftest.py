"""What the tests of trained models share: the files where they were fetched, packed weights, a server of each model.

A test that needs a model which was not fetched is skipped, with the command that fetches it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from e2e.served import Served
from quire_server.checkpoint.gguf_folder import unfolded
from quire_server.checkpoint.trained import TRAINED

RealModel = Callable[[str], Path]


@pytest.fixture(scope="session")
def real_model() -> RealModel:
    """Gives the GGUF file of a model by its short name, or skips the test."""

    def find(name: str) -> Path:
        path = TRAINED[name].path
        if not path.is_file():
            pytest.skip(f"{name} was not fetched: make real-models ARGS={name}")
        return path

    return find


@pytest.fixture(scope="session")
def unfolded_model(real_model: RealModel) -> RealModel:
    """Gives the directory of a model with its configuration and tokenizer as files."""
    known: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in known:
            known[name] = unfolded(real_model(name))
        return known[name]

    return find


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of packed weights, so that each form is packed once."""
    folder = tmp_path_factory.mktemp("packed")
    folder.chmod(0o700)
    return folder


@pytest.fixture(scope="module", params=TRAINED)
def server(request: pytest.FixtureRequest, real_model: RealModel, packed: Path) -> Iterator[Served]:
    """A server of each trained model by its short name, as it is stored, with guesses from earlier text."""
    real_model(request.param)
    with serve(request.param, packed, "--speculation", "suffix") as served:
        yield served


@pytest.fixture(scope="module")
def smollm2(real_model: RealModel, packed: Path) -> Iterator[Served]:
    """A server of SmolLM2, which has a chat template."""
    real_model("smollm2")
    with serve("smollm2", packed) as served:
        yield served


def serve(name: str, packed: Path, *flags: str) -> Served:
    """A server of a trained model with room for a few long requests."""
    usual = ("--device", "cpu", "--max-model-len", "4096", "--kv-memory", "512MiB", "--packed-cache", str(packed))
    return Served(name, *usual, *flags, start_seconds=300)
