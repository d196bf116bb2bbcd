"""Damaged files of weights: each is read, or ends in one line that names it; `--times 500` for 100,000 of them.

Promises: the same damage for the same number of runs.
"""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path

import pytest
import torch

from quire_engine.contract.errors import ModelLoadError
from quire_engine.execution.models.checkpoint import open_checkpoint
from quire_engine.execution.models.config import load_model_config
from quire_engine.execution.models.weights import checked_checkpoint
from quire_engine.gguf import read_gguf
from quire_server.checkpoint.gguf_config import check_types, config_of
from quire_server.checkpoint.gguf_tokenizer import GgufVocabulary
from quire_server.text.tokenizer import TextTokenizer
from support.gguf_models import make_gguf

RUNS = 100  # of each format
EXTREMES = (0, 1, 2, 7, 8, 31, 32, 255, 1 << 16, (1 << 31) - 1, 1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
TINY = {
    **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16},
    **{"num_key_value_heads": 1, "vocab_size": 448},
}
PEAK_SHARE, PEAK = 12, 1 << 18  # bytes that Python may allocate for each byte of a file, and beside them


def kinds(name: str, shape: tuple[int, ...]) -> str:
    """Several types in one file."""
    if len(shape) == 1:
        return "F32"
    return {"attn_q": "Q8_0", "attn_k": "IQ4_NL", "ffn_up": "MXFP4", "token_embd": "F16"}.get(
        name.split(".")[-2], "Q4_0"
    )


def damaged(data: bytes, header: int, chance: random.Random) -> bytes:
    """A few changes, most of them where counts, lengths and offsets are."""
    found = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        place = chance.randrange(min(header, len(found)) if chance.random() < 0.9 else len(found))
        kind = chance.randrange(7)
        if kind == 0:
            found[place] ^= 1 << chance.randrange(8)
        elif kind == 1:
            found[place] = chance.choice((0, 1, 8, 9, 0x7F, 0x80, 0xFF, chance.randrange(256)))
        elif kind == 2:
            size = chance.choice((2, 4, 8))
            found[place : place + size] = (chance.choice(EXTREMES) % (1 << 8 * size)).to_bytes(size, "little")
        elif kind == 3:
            del found[place:]
        elif kind == 4:
            del found[place : place + chance.choice((1, 4, 8, 100))]
        elif kind == 5:
            found[place:place] = chance.randbytes(chance.choice((1, 4, 8, 100)))
        else:
            other = chance.randrange(len(found))
            found[place : place + 8] = found[other : other + 8]
        if not found:
            break
    return bytes(found)


def outcome(read: object, file: Path) -> str:
    """ "read", or the reason without the file's name."""
    assert callable(read)
    try:
        read()
    except ModelLoadError as error:
        line = str(error)
        assert "\n" not in line
        assert str(file.parent) in line
        return line.replace(str(file.parent), "")[:60]
    return ""


def read_all(folder: Path) -> None:
    """The tensors, as an engine reads them: as numbers, and as they are stored."""
    with checked_checkpoint(folder, load_model_config(folder)) as checkpoint:
        for name in sorted(checkpoint.names):
            checkpoint.tensor(name)
            stored = checkpoint.stored_matrix(name)
            assert stored is None or bool(torch.isfinite(stored.dequantised()).all())
            checkpoint.done(name)


def serve(file: Path) -> None:
    """Everything that a start reads of a GGUF file."""
    tracemalloc.start()
    try:
        model = read_gguf(file)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < PEAK_SHARE * file.stat().st_size + PEAK
    check_types(model)
    config = config_of(model)
    vocabulary = GgufVocabulary(model.metadata)
    special = vocabulary.special()
    written = {
        "config.json": config | {"eos_token_id": list(special.end_ids)},
        "tokenizer.json": vocabulary.tokenizer(),
        "tokenizer_config.json": special.config(config["max_position_embeddings"]),
    }
    for name, value in written.items():
        (file.parent / name).write_text(json.dumps(value))
    TextTokenizer.load(file.parent)
    read_all(file.parent)


@pytest.fixture
def runs(pytestconfig: pytest.Config) -> int:
    return RUNS * int(pytestconfig.getoption("--times", default=1))


def test_damaged_gguf_files_are_read_or_refused_in_one_line(runs: int, tmp_path: Path) -> None:
    path, _ = make_gguf(tmp_path, "qwen3", kinds=kinds, **TINY)
    folder = tmp_path / "served"
    folder.mkdir()
    file = folder / "x.gguf"
    good = path.read_bytes()
    file.write_bytes(good)
    serve(file)
    header = min(tensor.offset for tensor in read_gguf(path).tensors.values())
    chance = random.Random(20)
    reasons: set[str] = set()
    for _ in range(runs):
        file.write_bytes(damaged(good, header, chance))
        reasons.add(outcome(lambda: serve(file), file))
    assert "" in reasons  # some damage is to names and numbers that any file may have
    assert len(reasons) > 20


def test_damaged_safetensors_files_are_read_or_refused_in_one_line(runs: int, tmp_path: Path) -> None:
    _, dense = make_gguf(tmp_path, "qwen3", **TINY)
    file = dense / "model.safetensors"
    good = file.read_bytes()
    read_all(dense)
    header = 8 + int.from_bytes(good[:8], "little")
    chance = random.Random(21)
    reasons: set[str] = set()
    for _ in range(runs):
        file.write_bytes(damaged(good, header, chance))
        reasons.add(outcome(lambda: read_all(dense), file))
    assert "" in reasons
    assert len(reasons) > 3
    with pytest.raises(ModelLoadError), open_checkpoint(dense / "none"):
        pass
