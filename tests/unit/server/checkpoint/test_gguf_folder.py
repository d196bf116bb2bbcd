"""GGUF files by their names: one file, or a directory; and what is refused before an engine starts."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire_engine.contract.errors import ModelLoadError
from quire_engine.gguf import Gguf, read_gguf
from quire_lab.simulation.kv_memory import kv_shape
from quire_server.checkpoint.gguf_config import check_types, config_of
from quire_server.checkpoint.gguf_folder import models, of_quantisation, shard_names, short_name, unfolded
from quire_server.checkpoint.inspect import check_checkpoint
from quire_server.checkpoint.locate import checkpoint_directory, localized, other_names
from quire_server.settings import Settings
from quire_server.text.generation_config import generation_defaults
from quire_server.text.tokenizer import TextTokenizer
from support.gguf_files import Stored, Typed, write_gguf
from support.gguf_models import make_gguf


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, _ = make_gguf(tmp_path_factory.mktemp("file"), "qwen3")
    return path


def placed(file: Path, folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        shutil.copy(file, folder / name)
    return folder


def test_a_file_is_a_checkpoint_of_its_own_name(file: Path, tmp_path: Path) -> None:
    path = placed(file, tmp_path / "models", "Tiny-Q4_K_M.gguf") / "Tiny-Q4_K_M.gguf"
    settings = localized(Settings(model=str(path)))
    folder = settings.model_path
    assert settings.model_names == ("Tiny-Q4_K_M",)
    assert other_names(settings) == (str(path), "Tiny-Q4_K_M.gguf", "Tiny")
    assert sorted(each.name for each in folder.iterdir()) == [
        *(
            "Tiny-Q4_K_M.gguf",
            "config.json",
            "generation_config.json",
            "lock",
            "tokenizer.json",
            "tokenizer_config.json",
            "typed-name",
        ),
    ]
    assert (folder / "Tiny-Q4_K_M.gguf").readlink() == path
    check_checkpoint(folder)
    check_checkpoint(folder, "native")
    with pytest.raises(ModelLoadError, match="computed by entries of ours"):
        localized(Settings(model=str(path), model_impl="transformers"))
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["eos_token_id"] == [2, 0]
    named = localized(Settings(model=str(path), served_model_name=("mine",)))
    assert (named.model_names, other_names(named)) == (("mine",), ())
    draft = localized(Settings(speculation=f"model:{path}"))
    assert (Path(draft.speculation.removeprefix("model:")) / "config.json").is_file()
    tokenizer = localized(Settings(tokenizer=str(path)))
    assert (Path(str(tokenizer.tokenizer)) / "tokenizer.json").is_file()


def test_messages_name_the_file_as_the_user_did(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placed(file, tmp_path, "tiny.gguf")
    monkeypatch.chdir(tmp_path)
    folder = localized(Settings(model="tiny.gguf")).model_path
    (folder / "tokenizer.json").write_text("{")
    (folder / "generation_config.json").write_text('{"temperature": 9}')
    (folder / "config.json").write_text("{}")
    for read in (
        lambda: TextTokenizer.load(folder),
        lambda: generation_defaults("auto", {}, folder),
        lambda: kv_shape(folder),
    ):
        with pytest.raises(ModelLoadError, match=r"^tiny\.gguf: "):
            read()


def in_a_process(file: Path, home: Path, end: str = "") -> list[str]:
    """Where a process that ends so has put the file's configuration."""
    code = (
        "import os, sys; from quire_server.checkpoint.locate import checkpoint_directory;"
        f"print(checkpoint_directory({str(file)!r}), 'torch' in sys.modules, flush=True); {end}"
    )
    environment = {**os.environ, "HOME": str(home), "TMPDIR": str(home.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert done.stdout, done.stderr
    return done.stdout.split()


def test_the_folder_goes_with_the_process(file: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    kept = home / ".cache" / "quire" / "gguf"
    folder, has_torch = in_a_process(file, home)
    assert has_torch == "False"
    assert Path(folder).parent == kept
    assert list(kept.iterdir()) == []
    killed, _ = in_a_process(file, home, "os.kill(os.getpid(), 9)")
    assert list(kept.iterdir()) == [Path(killed)]
    with (Path(killed) / "lock").open("rb") as held:  # as by a process that runs
        fcntl.flock(held, fcntl.LOCK_EX)
        in_a_process(file, home)
        assert list(kept.iterdir()) == [Path(killed)]
    in_a_process(file, home)
    assert list(kept.iterdir()) == []


@pytest.mark.matrix  # where a folder can be made: the test before
def test_without_a_home_the_folder_is_a_temporary_one(file: Path, tmp_path: Path) -> None:
    (tmp_path / "nobody").write_text("")  # no folder can be made there
    elsewhere, _ = in_a_process(file, tmp_path / "nobody")
    assert Path(elsewhere).parent == tmp_path
    assert not Path(elsewhere).exists()
    assert file.exists()


def test_a_directory_with_one_model_is_that_model(file: Path, tmp_path: Path) -> None:
    folder = placed(file, tmp_path / "tiny", "a.gguf", "mmproj-a-f16.gguf")
    settings = localized(Settings(model=str(folder)))
    assert (settings.model_names, other_names(settings)) == (("tiny",), (str(folder), "a.gguf", "a"))
    assert (settings.model_path / "a.gguf").exists()
    placed(file, folder, "b-Q8_0.gguf")
    with pytest.raises(ModelLoadError, match=r"tiny: 2 models; name one file: a\.gguf, b-Q8_0\.gguf"):
        localized(Settings(model=str(folder)))
    (folder / "model.safetensors").write_text("")
    assert checkpoint_directory(str(folder)) == folder  # which has safetensors, and is taken as it is


def test_several_files_are_one_model(tmp_path: Path) -> None:
    first, _ = make_gguf(tmp_path / "split", "qwen3", shards=3)
    shutil.rmtree(tmp_path / "split" / "dense")
    settings = localized(Settings(model=str(first)))
    assert settings.model_names[0] == "qwen3"
    assert len(list(settings.model_path.glob("*.gguf"))) == 3
    assert localized(Settings(model=str(first.parent))).model_names[0] == "split"
    with pytest.raises(ModelLoadError, match=r"name the first, .*qwen3-00001-of-00003\.gguf"):
        localized(Settings(model=str(first.with_name("qwen3-00002-of-00003.gguf"))))


def test_a_tokenizer_beside_the_file_wins(file: Path, tmp_path: Path) -> None:
    folder = placed(file, tmp_path / "tiny", "a.gguf")
    own = file.parent / "dense"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(own / name, folder / name)
    (folder / "config.json").write_text('{"architectures": ["Other"]}')  # which is not read
    made = unfolded(folder / "a.gguf")
    assert (made / "tokenizer.json").readlink() == folder / "tokenizer.json"
    assert json.loads((made / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    assert json.loads((made / "config.json").read_text())["eos_token_id"] == [2, 0]
    strange = placed(changed(file, tmp_path, {"tokenizer.ggml.pre": "unheard-of"}), tmp_path / "strange", "a.gguf")
    with pytest.raises(ModelLoadError, match=r"put the model's tokenizer\.json beside the file"):
        unfolded(strange / "a.gguf")
    elsewhere = localized(Settings(model=str(strange / "a.gguf"), tokenizer=str(own)))
    assert not (elsewhere.model_path / "tokenizer.json").exists()
    shutil.copy(own / "tokenizer.json", strange / "tokenizer.json")
    assert unfolded(strange / "a.gguf")


def test_defaults_of_sampling_are_those_of_the_file(file: Path, tmp_path: Path) -> None:
    sampling = {"temp": 0.6, "top_k": Typed("i32", 20), "top_p": 0.95, "min_p": 0.0, "penalty_repeat": 1.05}
    path = changed(file, tmp_path, {f"general.sampling.{key}": value for key, value in sampling.items()})
    found = generation_defaults("auto", {}, unfolded(path))
    assert found.shown == {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.05}
    assert found.source == "the file and llama.cpp"


def test_a_file_without_defaults_of_sampling_has_those_of_its_format(file: Path) -> None:
    folder = unfolded(file)
    found = generation_defaults("auto", {}, folder)
    assert found.shown == {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    assert found.source == "llama.cpp"
    own = generation_defaults("auto", {"temperature": 0.2}, folder)
    assert own.shown == {"temperature": 0.2, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    assert generation_defaults("none", {}, folder).shown == {}


def changed(file: Path, folder: Path, change: dict[str, Any]) -> Path:
    """The file with other metadata; None leaves a key out."""
    found = read_gguf(file)
    texts = {key: found.metadata.raw(key) for key in sorted(found.metadata.keys())}
    values = {key: value for key, value in (texts | change).items() if value is not None}
    data = file.read_bytes()
    tensors = [
        Stored(each.name, each.kind.name, each.shape, data[each.offset : each.offset + each.num_bytes])
        for each in found.tensors.values()
    ]
    return write_gguf(folder / f"changed-{len(list(folder.iterdir()))}.gguf", values, tensors)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": ({"general.architecture": "mamba"}, "general.architecture='mamba' is not read from GGUF"),
    "no architecture": ({"general.architecture": None}, "general.architecture is missing"),
    "an adapter": ({"general.type": "adapter"}, "general.type='adapter': not a model that answers by itself"),
    "experts": ({"qwen3.expert_count": 8}, "qwen3.expert_count: experts of this architecture are not read"),
    "an unknown key": ({"qwen3.swin_norm": True}, "qwen3.swin_norm=True: not known of qwen3, so the numbers might be"),
    "a rotation of vision": ({"qwen3.rope.dimension_sections": [1, 2]}, "qwen3.rope.dimension_sections=a list of 2"),
    "an unknown rotation": ({"qwen3.rope.scaling.type": "su"}, "qwen3.rope.scaling.type='su' is not supported"),
    "layers that differ": ({"qwen3.attention.head_count_kv": [2, 1]}, "head_count_kv differs from layer to layer"),
    "values of another width": ({"qwen3.attention.value_length": 16}, "attention.value_length differs from that of"),
    "rows that see behind": ({"qwen3.attention.causal": False}, "qwen3.attention.causal=False is not supported"),
    "means of vectors": ({"qwen3.pooling_type": 1}, "qwen3.pooling_type=1 is not supported"),
    "no length": ({"qwen3.context_length": None}, "qwen3.context_length is missing"),
    "no heads": ({"qwen3.attention.head_count": 0}, "head_count must be an integer from 1 to 2147483647, not 0"),
    "a vocabulary of more": ({"qwen3.vocab_size": 9999}, "qwen3.vocab_size is more than the 512 rows"),
    "an amplitude": (
        {"qwen3.rope.scaling.type": "yarn", "qwen3.rope.scaling.factor": 4.0, "qwen3.rope.scaling.attn_factor": 0.7},
        "rope.scaling.attn_factor=0.7 is not supported",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_one_line_that_names_the_key(name: str, file: Path, tmp_path: Path) -> None:
    change, reason = REFUSED[name]
    path = changed(file, tmp_path, change)
    with pytest.raises(ModelLoadError) as caught:
        localized(Settings(model=str(path)))
    line = str(caught.value)
    assert reason in line
    assert str(path) in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("kind", "values", "size", "use"), [("IQ2_XS", 256, 74, "Q2_K or Q3_K_M"), ("F64", 1, 8, "Q4_K_M, Q8_0 or BF16")]
)
def test_types_that_are_not_read_are_refused_with_what_to_use(
    kind: str, values: int, size: int, use: str, tmp_path: Path
) -> None:
    path = write_gguf(
        tmp_path / "x.gguf", {"general.architecture": "qwen3"}, [Stored("m", kind, (2, values), bytes(2 * size))]
    )
    with pytest.raises(ModelLoadError, match=f"tensor 'm' is stored as {kind}, which is not read; use a file .* {use}"):
        localized(Settings(model=str(path)))


def config(file: Path, folder: Path, architecture: str, change: dict[str, Any]) -> dict[str, object]:
    """The configuration of a file whose keys are those of another architecture."""
    metadata = read_gguf(file).metadata
    keys = {key: metadata.raw(key) for key in metadata.unread("qwen3.")}
    moved = {key.replace("qwen3", architecture, 1): value for key, value in keys.items()}
    named = {f"{architecture}.{key}": value for key, value in change.items()}
    path = changed(file, folder, dict.fromkeys(keys) | moved | {"general.architecture": architecture} | named)
    return config_of(read_gguf(path))


def test_the_largest_gemmas_scale_queries_by_a_share_of_the_width(file: Path, tmp_path: Path) -> None:
    window = {"attention.sliding_window": 512}
    for architecture, layers, each in (("gemma2", 46, 2), ("gemma3", 62, 6)):
        large = config(file, tmp_path, architecture, {"block_count": layers, **window})
        assert large["query_pre_attn_scalar"] == 64 / 4
        small = config(file, tmp_path, architecture, {"block_count": 26, **window})
        assert small["query_pre_attn_scalar"] == 32
        types = small["layer_types"]
        assert isinstance(types, list)
        assert [place for place, kind in enumerate(types) if kind == "full_attention"] == list(
            range(each - 1, 26, each)
        )


def test_windows_by_an_interval_and_by_a_list_are_read(file: Path, tmp_path: Path) -> None:
    every = {"attention.sliding_window": 512, "attention.sliding_window_pattern": 2}
    assert config(file, tmp_path, "gemma3", every)["layer_types"] == ["sliding_attention", "full_attention"]
    listed = every | {"attention.sliding_window_pattern": Typed("bool", [False, True])}
    assert config(file, tmp_path, "gemma3", listed)["layer_types"] == ["full_attention", "sliding_attention"]
    short = every | {"attention.sliding_window_pattern": Typed("bool", [False])}
    with pytest.raises(ModelLoadError, match="sliding_window_pattern must have a truth value for each of 2 layers"):
        config(file, tmp_path, "gemma3", short)


def test_names_of_files_and_their_tags() -> None:
    names = [
        *("Tiny-Q4_K_M.gguf", "Tiny-UD-Q4_K_XL.gguf", "tiny.q8_0.gguf", "README.md", "mmproj-F16.gguf", "imatrix.gguf"),
        *("BF16/Tiny-BF16-00001-of-00002.gguf", "BF16/Tiny-BF16-00002-of-00002.gguf", "Tiny-IQ4_XS.gguf"),
    ]
    assert models(names) == [
        *("BF16/Tiny-BF16-00001-of-00002.gguf", "Tiny-IQ4_XS.gguf", "Tiny-Q4_K_M.gguf", "Tiny-UD-Q4_K_XL.gguf"),
        "tiny.q8_0.gguf",
    ]
    assert of_quantisation(names, "Q4_K_M") == ["Tiny-Q4_K_M.gguf"]
    assert of_quantisation(names, "q8_0") == ["tiny.q8_0.gguf"]
    assert of_quantisation(names, "bf16") == ["BF16/Tiny-BF16-00001-of-00002.gguf"]
    assert of_quantisation(names, "Q4_K_XL") == of_quantisation(names, "UD-Q4_K_XL") == ["Tiny-UD-Q4_K_XL.gguf"]
    assert of_quantisation(names, "4_K_M") == []
    assert of_quantisation(names, ".*") == []
    assert shard_names("BF16/Tiny-BF16-00001-of-00002.gguf", names) == names[6:8]
    assert shard_names("Tiny-Q4_K_M.gguf", names) == ["Tiny-Q4_K_M.gguf"]
    assert short_name("BF16/Tiny-BF16-00001-of-00002.gguf") == "BF16/Tiny-BF16"


def test_a_file_whose_types_are_read_passes(file: Path) -> None:
    found: Gguf = read_gguf(file)
    check_types(found)
    assert config_of(found)["quantization_config"] == {
        **{"quant_method": "gguf", "types": "F32", "main_type": "Q4_K_M", "interleaved": False},
    }
