"""Models by their names on the Hub: from the cache, downloaded, or refused with what to do."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire_engine.contract.config import ARCHITECTURES
from quire_engine.contract.errors import ModelLoadError
from quire_engine.demo import demo_model_path
from quire_engine.execution.models.families import FAMILIES
from quire_server.checkpoint.inspect import check_checkpoint
from quire_server.checkpoint.locate import localized
from quire_server.settings import Settings
from support.gguf_models import make_gguf
from support.loopback_hub import COMMIT, LoopbackHub, serving

# The library reads its variables when it is imported: each story is a process.
ASK = """
import json, logging, sys
from quire_engine.contract.errors import ModelLoadError
from quire_server.checkpoint.locate import localized
from quire_server.settings import Settings
logging.basicConfig(level="INFO", format="%(message)s")
answers = []
for asked in json.loads(sys.argv[1]):
    try:
        llm = asked.pop("llm", None)
        if llm:  # the offline API takes seconds to import
            from quire.llm import engine_settings
        settings = engine_settings(llm, asked) if llm else localized(Settings(**asked))
        answers.append([settings.model, list(settings.model_names), settings.tokenizer])
    except ModelLoadError as error:
        answers.append(str(error))
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackHub]:
    folder = tmp_path_factory.mktemp("repositories")
    good = folder / "good"
    shutil.copytree(demo_model_path(), good)
    (good / "original").mkdir()
    (good / "original" / "consolidated.safetensors").write_text("another layout")
    (good / "original" / "params.json").write_text("another layout")
    (good / "additional_chat_templates").mkdir()
    (good / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (good / "pytorch_model.bin").write_text("pickled")
    repositories = {"org/tiny": good, "org/gated": good}
    for name, files in {
        "org/tiny-GGUF": ["model-Q4.gguf", "README.md"],
        "org/adapter": ["adapter_config.json", "adapter_model.safetensors"],
        "org/pickled": ["config.json", "pytorch_model.bin", "tokenizer.json"],
        "org/sentencepiece": ["config.json", "model.safetensors", "tokenizer.model"],
    }.items():
        repositories[name] = folder / name.split("/")[1]
        repositories[name].mkdir()
        for file in files:
            (repositories[name] / file).write_text("{}")
    with serving(LoopbackHub(repositories, gated=frozenset({"org/gated"}))) as served:
        yield served


@pytest.fixture
def gguf_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackHub]:
    folder = tmp_path_factory.mktemp("files")
    (folder / "BF16").mkdir()
    first, _ = make_gguf(tmp_path_factory.mktemp("made"), "qwen3", shards=2)
    for path in first.parent.glob("*.gguf"):
        shutil.copy(path, folder / "BF16" / path.name)
    whole, _ = make_gguf(tmp_path_factory.mktemp("made"), "qwen3")
    shutil.copy(whole, folder / "tiny-Q4_K_M.gguf")
    (folder / "README.md").write_text("words")
    with serving(LoopbackHub({"org/files": folder})) as served:
        yield served


def ask(hub: LoopbackHub, home: Path, *asked: dict[str, object], **variables: str) -> tuple[list[object], str]:
    """What `localized` answers in a process of its own, and what it has printed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "QUIRE_", "VLLM_"))}
    done = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(asked)],
        env={**kept, "HF_HOME": str(home), "HF_ENDPOINT": hub.url, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_a_model_is_downloaded_once_with_what_is_read(hub: LoopbackHub, tmp_path: Path):
    (first,), said = ask(hub, tmp_path, {"model": "org/tiny"})
    folder = Path(first[0])
    assert folder == tmp_path / "hub" / "models--org--tiny" / "snapshots" / COMMIT
    assert first[1] == ["org/tiny"]
    files = {path.name for path in folder.iterdir()}
    own = {path.name for path in demo_model_path().iterdir()} - {"README.md", "training.json"}
    assert files == own | {"additional_chat_templates"}
    assert (folder / "additional_chat_templates" / "tool_use.jinja").read_text() == "tools"
    for name in own:
        assert (folder / name).read_bytes() == (demo_model_path() / name).read_bytes()
    assert "org/tiny: downloading" in said
    assert "%" in said  # the library's bars

    hub.requests.clear()
    again, said = ask(hub, tmp_path, {"model": "org/tiny", "served_model_name": ["mine"], "tokenizer": "org/tiny"})
    assert again == [[str(folder), ["mine"], str(folder)]]
    assert hub.requests == []
    assert "in the cache" in said

    (folder / "tokenizer.json").unlink()  # as an interrupted download leaves it
    page = "https://huggingface.co/org/tiny"
    assert ask(hub, tmp_path, {"model": page})[0] == [[first[0], ["org/tiny"], first[2]]]
    assert (folder / "tokenizer.json").is_file()


@pytest.mark.matrix  # the cache with the Hub: the test before; the variable: test_without_the_hub
def test_a_cached_model_is_found_offline_and_by_the_offline_api(hub: LoopbackHub, tmp_path: Path):
    first, _ = ask(hub, tmp_path, {"model": "org/tiny"})
    assert ask(hub, tmp_path, {"model": "org/tiny"}, HF_HUB_OFFLINE="1")[0] == first
    assert ask(hub, tmp_path, {"llm": "org/tiny", "revision": "main"})[0] == first


def test_another_place_and_a_revision_and_a_token(hub: LoopbackHub, tmp_path: Path):
    place = tmp_path / "models"
    ((model, _, _), wrong, gated), _ = ask(
        hub,
        tmp_path / "home",
        {"model": "org/tiny", "download_dir": str(place), "revision": COMMIT},
        {"model": "org/tiny", "download_dir": str(place), "revision": "v9"},
        {"model": "org/gated"},
        HF_TOKEN="hf_good",
    )
    assert Path(model).is_relative_to(place)
    assert "there is no revision 'v9' of it" in str(wrong)
    assert gated[1] == ["org/gated"]


def test_what_the_hub_refuses_is_one_line(hub: LoopbackHub, tmp_path: Path):
    names = ["org/nothing", "org/gated", "org/tiny-GGUF", "org/adapter", "org/pickled", "org/sentencepiece"]
    expected = [
        f"there is no such model at {hub.url}, or it is private and needs HF_TOKEN",
        f"gated: accept its terms at {hub.url}/org/gated, then set HF_TOKEN",
        "it has GGUF files; add a colon and what the name of one of them ends with, such as :Q4_K_M; there are model",
        "an adapter (LoRA)",
        "the weights are pickled",
        "there is no tokenizer.json",
    ]
    answers, _ = ask(hub, tmp_path, *({"model": name} for name in names))
    for name, answer, words in zip(names, answers, expected, strict=True):
        assert str(answer).startswith(f"{name}: ")
        assert words in str(answer)
        assert "\n" not in str(answer)
    assert not list(tmp_path.rglob("*.gguf"))


@pytest.mark.matrix  # as a whole repository
def test_one_gguf_file_of_a_repository_is_downloaded(gguf_hub: LoopbackHub, tmp_path: Path):
    (small, split, again), said = ask(
        gguf_hub, tmp_path, *({"model": f"org/files:{tag}"} for tag in ("q4_k_m", "BF16", "Q4_K_M"))
    )
    snapshot = tmp_path / "hub" / "models--org--files" / "snapshots" / COMMIT
    assert small[1] == ["org/files:q4_k_m"], (small, split)
    assert again[1] == ["org/files:Q4_K_M"]
    assert split[1] == ["org/files:BF16"], split
    assert "org/files: downloading 1 files" in said
    names = sorted(path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if not path.is_dir())
    assert names == ["BF16/qwen3-00001-of-00002.gguf", "BF16/qwen3-00002-of-00002.gguf", "tiny-Q4_K_M.gguf"]

    gguf_hub.requests.clear()
    (cached, offline), said = ask(gguf_hub, tmp_path, *[{"model": "org/files:BF16"}] * 2)
    assert [cached[1], offline[1]] == [["org/files:BF16"]] * 2, cached
    assert gguf_hub.requests == []
    assert "in the cache" in said
    assert ask(gguf_hub, tmp_path, {"model": "org/files:Q4_K_M"}, HF_HUB_OFFLINE="1")[0][0][1] == ["org/files:Q4_K_M"]

    refused, _ = ask(gguf_hub, tmp_path, *({"model": name} for name in ("org/files:Q9", "org/files", "org/none:Q8_0")))
    for line, words in zip(
        refused,
        (
            "org/files: no GGUF file has Q9 in the name; there are BF16/qwen3-00001-of-00002.gguf, tiny-Q4_K_M.gguf",
            "org/files: it has GGUF files; add a colon and what the name of one of them ends with, such as :Q4_K_M",
            "org/none: there is no such model",
        ),
        strict=True,
    ):
        assert words in str(line)
    (offline,), _ = ask(gguf_hub, tmp_path, {"model": "org/files:Q8_0"}, HF_HUB_OFFLINE="1")
    assert "org/files:Q8_0: not in the cache" in str(offline)


def test_without_the_hub(tmp_path: Path):
    away = LoopbackHub({})
    away.url = "http://127.0.0.1:9"
    (unreachable,), _ = ask(away, tmp_path, {"model": "org/tiny"})
    assert "127.0.0.1:9 cannot be reached" in str(unreachable)
    (offline,), _ = ask(away, tmp_path, {"model": "org/tiny"}, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in str(offline)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere", "there is no such directory"),
        ("./nowhere/else", "there is no such directory"),
        ("a/b/c", "there is no such directory"),
        ("model.gguf", "GGUF"),
    ],
)
def test_names_that_are_none_on_the_hub(name: str, words: str):
    with pytest.raises(ModelLoadError, match=words):
        localized(Settings(model=name))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"model.gguf": ""}, "GGUF"),
        ({"adapter_config.json": "{}", "adapter_model.safetensors": ""}, "an adapter"),
        ({"config.json": "{}", "pytorch_model.bin": ""}, "pickled"),
        ({"config.json": "{}"}, "no weights"),
        ({}, "config.json: the file is missing"),
    ],
)
def test_directories_that_cannot_be_served_are_called_by_their_names(tmp_path: Path, files: dict[str, str], words: str):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ModelLoadError, match=words.replace("(", r"\(")):
        localized(Settings(model=str(tmp_path)))


def test_an_architecture_without_an_entry_is_left_to_the_engine_unless_native_is_asked_for(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"architectures": ["NemotronForCausalLM"]}')
    (tmp_path / "model.safetensors").write_text("")
    assert localized(Settings(model=str(tmp_path)))
    with pytest.raises(ModelLoadError, match="NemotronForCausalLM have no entry of ours; those are LlamaForCausalLM"):
        localized(Settings(model=str(tmp_path), model_impl="native"))


def test_directories_are_taken_as_they_are():
    settings = Settings(model=str(demo_model_path()))
    assert localized(settings) is settings
    assert localized(Settings()) == Settings()
    check_checkpoint(demo_model_path())


def test_a_draft_model_is_found_like_a_model(tmp_path: Path):
    found = localized(Settings(speculation="model:quire-demo"))
    assert found.speculation == f"model:{found.model_path}"
    assert localized(found).speculation == found.speculation
    with pytest.raises(ModelLoadError, match=r"--speculation .*/none: there is no such directory"):
        localized(Settings(speculation=f"model:{tmp_path}/none"))
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        localized(Settings(speculation=f"model:{tmp_path}"))


def test_the_architectures_that_are_named_are_those_that_are_built():
    assert tuple(FAMILIES) == ARCHITECTURES
    document = (Path(__file__).parents[4] / "docs" / "models.md").read_text()
    assert tuple(re.findall(r"^\| `(\w+)` \|", document.split("\n## ")[1], re.MULTILINE)) == ARCHITECTURES
