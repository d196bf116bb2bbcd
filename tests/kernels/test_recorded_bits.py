"""The bits of the four first families on every instruction set, held to a record.

A change of a record is a change of every answer and every packed file, so it is made on purpose or not at all. Weights,
tokens and rotary angles come from integer arithmetic, so that neither torch nor the C library has a part in them.
`python -m kernels.test_recorded_bits`, with tests/ in PYTHONPATH, adds what the record lacks of this machine's sets.
"""

from __future__ import annotations

import json
import zlib
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from quire_engine.execution.models import weights
from quire_engine.execution.models.config import load_model_config
from quire_kernels.cpu.library import load_library
from quire_kernels.cpu.ops import cpu_kernel_set
from quire_kernels.cpu.variants import Variant, usable_variants
from support.model_steps import Model, scheduled

RECORD = Path(__file__).parent / "data" / "recorded_bits.json"
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"mlp_bias": True},
    "MistralForCausalLM": {"sliding_window": 24, "head_dim": 16},
    "Qwen2ForCausalLM": {"tie_word_embeddings": True},
    "Qwen3ForCausalLM": {"head_dim": 32},
}
KINDS = (None, "int8", "int4")
_SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
}


def integers(name: str, count: int) -> np.ndarray:
    """[count] int64 of -128 .. 127, by SplitMix64."""
    with np.errstate(over="ignore"):
        z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z += np.uint64(zlib.crc32(name.encode()))
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z >> np.uint64(56)).astype(np.int64) - 128


def checkpoint(path: Path, architecture: str) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"architectures": [architecture], **_SHAPE, **FAMILIES[architecture]}))
    tensors = {}
    for name, shape in weights.expected_shapes(load_model_config(path)).items():
        values = torch.from_numpy(integers(name, int(np.prod(shape)))).view(shape) / 512
        tensors[name] = (values + 1 if "norm" in name else values).bfloat16()
    save_file(tensors, path / "model.safetensors")
    return path


def coarse_table(rope: object, head_dim: int, num_positions: int, *, rotary_dim: int) -> torch.Tensor:
    """Angles from rational numbers in place of cosines, which libraries round each in their way."""
    del rope, rotary_dim
    turns = torch.arange(num_positions).unsqueeze(1) * (3 + torch.arange(head_dim // 2)) % 64
    return torch.cat([(turns - 32) / 32, (turns % 16 - 8) / 8], dim=1).to(torch.float32)


def digests(path: Path, variant: Variant) -> dict[str, str]:
    """Of logits and pool, by family, form of the weights and of the pool."""
    found = {}
    library = load_library(variant)
    tokens = (integers("tokens", 90) + 128).tolist()
    for architecture in FAMILIES:
        folder = checkpoint(path / architecture, architecture)
        for kind in KINDS:
            for kv_type in ("bf16", "int8"):
                kernels = cpu_kernel_set(2, kind, kv_type=kv_type, library=library)
                model = Model(folder, dtype=torch.bfloat16, num_blocks=16, kernels=kernels)
                blocks = model.blocks()
                first, second = blocks.take(64), blocks.take(30)
                logits = model.step(scheduled(tokens[:64], first, 0, 40))
                logits += model.step(scheduled(tokens[:64], first, 40, 1), scheduled(tokens[60:], second, 0, 30))
                sums = sha256()
                for each in (*logits, model.kv.tensor.view(torch.uint8)):
                    sums.update(each.contiguous().numpy().tobytes())
                found[f"{architecture} {kind or 'bfloat16'} {kv_type}"] = sums.hexdigest()[:16]
    return found


@pytest.mark.parametrize("variant", usable_variants(), ids=lambda variant: variant.name)
def test_the_bits_are_those_of_the_record(variant: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "rope_table", coarse_table)
    record = json.loads(RECORD.read_text())
    if variant.name not in record:
        pytest.skip(f"{RECORD.name} was made on machines without {variant.name}")
    assert digests(tmp_path, variant) == record[variant.name]


def main() -> None:
    """Add the sets of this machine that the record lacks."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        patch.setattr(weights, "rope_table", coarse_table)
        for variant in usable_variants():
            if variant.name not in record:
                record[variant.name] = digests(Path(folder), variant)
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
