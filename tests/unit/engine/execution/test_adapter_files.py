"""Adapters that are read, and those that are refused in one line that names file and key."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire_engine.contract.errors import ModelLoadError
from quire_engine.execution.models.adapter import read_adapter
from quire_engine.execution.models.config import ModelConfig, load_model_config
from support.adapters import fused, write_adapter
from support.checkpoints import shared_checkpoint

Change = Callable[[Path], object]


def model_config(family: str = "qwen3") -> ModelConfig:
    return load_model_config(shared_checkpoint(family))


def configured(**keys: Any) -> Change:
    def change(path: Path) -> None:
        file = path / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))

    return change


def stored(edit: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def change(path: Path) -> None:
        file = path / "adapter_model.safetensors"
        tensors = load_file(file)
        edit(tensors)
        save_file(tensors, file)

    return change


def as_pipe(path: Path) -> None:
    (path / "adapter_config.json").unlink()
    os.mkfifo(path / "adapter_config.json")


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
BAD: dict[str, tuple[Change, str]] = {
    "a prompt's": (configured(peft_type="PROMPT_TUNING"), r'peft_type="PROMPT_TUNING": adapters are served of type'),
    "kasa": (configured(kasa_config={"beta": 1e-4}), "kasa_config=.*changes the model's own weights first"),
    "dora": (configured(use_dora=True), "use_dora=true: it is not supported: DoRA"),
    "modules": (configured(modules_to_save=["lm_head"]), r'modules_to_save=\["lm_head"\]: it is not supported'),
    "tokens": (configured(trainable_token_indices=[1]), "trainable_token_indices"),
    "parameters": (
        configured(target_parameters=["mlp.experts.gate_up_proj"]),
        "target_parameters names 'mlp.experts.gate_up_proj', which is no parameter of this model.*those are none",
    ),
    "no parameters": (configured(target_parameters="mlp.experts.gate_up_proj"), "target_parameters=.*no list of names"),
    "transposed": (configured(fan_in_fan_out=True), "fan_in_fan_out=true"),
    "biases": (configured(bias="all"), 'bias="all": it is not supported'),
    "own biases": (configured(lora_bias=True), "lora_bias=true"),
    "pissa": (configured(init_lora_weights="pissa_niter_16"), "changes the model's own weights"),
    "unknown": (configured(use_magic=False), "use_magic=false: it is unknown"),
    "no rank": (configured(r=0), "r=0: it is no rank"),
    "large": (configured(r=17), "r=17: rank 17 is more than --max-lora-rank 16"),
    "large somewhere": (configured(rank_pattern={"q_proj": 64}), "rank 64 is more than"),
    "no alpha": (configured(lora_alpha="8"), 'lora_alpha="8": it is no finite number'),
    "infinite": (configured(lora_alpha=math.inf), "lora_alpha=Infinity: it is no finite number"),
    "beyond float32": (configured(lora_alpha=1e308), r"lora_alpha=1e\+308: it is no finite number in float32"),
    "a long number": (configured(lora_alpha=10**400), "lora_alpha=1000.*: it is no finite number"),
    "a huge number": (configured(alpha_pattern={"q_proj": 1e39}), "alpha_pattern=.*: it is no object of numbers"),
    "a pipe": (as_pipe, "adapter_config.json: cannot be read: not a plain file"),
    "rslora": (configured(use_rslora=1), "use_rslora=1: it is neither"),
    "expression": (configured(rank_pattern={"(a+)+$": 4}), "is an expression"),
    "patterns": (configured(alpha_pattern=[1]), "alpha_pattern=.1.: it is no object"),
    "target": (configured(target_modules=["q_proj", "c_attn"]), "names 'c_attn', which is no matrix of this model"),
    "head": (configured(target_modules=["lm_head"]), "names 'lm_head'"),
    "targets": (configured(target_modules=[1]), "target_modules=.1.: it is no list of names"),
    "another rank": (configured(r=8), r"lora_A has rank 4, and adapter_config\.json says 8 \(r or rank_pattern\)"),
    "a target that is not there": (
        stored(lambda tensors: [tensors.pop(name) for name in list(tensors) if ".q_proj." in name]),
        "it has no tensor of 'q_proj', which target_modules of adapter_config.json names",
    ),
    "half a pair": (stored(lambda tensors: tensors.pop(Q)), r"self_attn.q_proj.lora_A is missing"),
    "embedding": (
        stored(lambda tensors: tensors.update({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64)})),
        "tensor base_model.model.lm_head.lora_A.weight: it belongs to no matrix",
    ),
    "vision": (
        stored(lambda t: t.update({Q.replace("model.layers", "visual.layers"): torch.zeros(4, 64)})),
        "it belongs to no matrix",
    ),
    "experts": (
        stored(lambda t: t.update({Q.replace("self_attn.q_proj", "mlp.experts.0.up_proj"): torch.zeros(4, 64)})),
        "belongs to no matrix",
    ),
    "layer": (stored(lambda t: t.update({Q.replace(".0.", ".7.", 1): torch.zeros(4, 64)})), "belongs to no matrix"),
    "magnitude": (
        stored(lambda t: t.update({Q.replace("lora_A.weight", "lora_magnitude_vector"): torch.zeros(4)})),
        "belongs to no matrix",
    ),
    "nan": (stored(lambda t: t[Q].fill_(math.nan)), "q_proj.lora_A holds values that are not finite"),
    "bytes": (stored(lambda t: t.update({Q: torch.zeros(4, 64, dtype=torch.uint8)})), "is stored as uint8"),
    "empty": (stored(lambda t: t.clear()), "it has no matrices for this model"),
    "damaged": (lambda p: (p / "adapter_model.safetensors").write_bytes(b"\\xff" * 64), "no file of safetensors"),
    "no json": (lambda p: (p / "adapter_config.json").write_text("{"), "adapter_config.json: it is not JSON"),
    "a list": (lambda p: (p / "adapter_config.json").write_text("[]"), "it is not an object"),
    "no config": (lambda p: (p / "adapter_config.json").unlink(), "adapter_config.json: cannot be read: No such"),
    "no weights": (lambda p: (p / "adapter_model.safetensors").unlink(), "adapter_model.safetensors: cannot be read"),
    "pickled": (
        lambda p: (p / "adapter_model.safetensors").rename(p / "adapter_model.bin"),
        "adapter_model.bin: pickles are not read",
    ),
    "huge": (
        lambda p: (p / "adapter_model.safetensors").write_bytes(bytes(12 << 20)),
        "larger than .* bytes, more than the adapted matrices can have with --max-lora-rank 16",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_adapter_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "adapter", shared_checkpoint("qwen3"))
    change, message = BAD[name]
    change(path)
    with pytest.raises(ModelLoadError, match=message) as refused:
        read_adapter(path, model_config(), max_rank=16)
    line = str(refused.value)
    assert line.startswith(str(path))
    assert "\n" not in line
    assert len(line) < 400 + len(str(path))


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no such directory of an adapter"):
        read_adapter(tmp_path / "none", model_config(), max_rank=16)
    for name in ("x" * 256, "a\0b"):
        with pytest.raises(ModelLoadError, match="no such directory of an adapter"):
            read_adapter(tmp_path / name, model_config(), max_rank=16)


def test_experts_are_refused_by_their_targets(tmp_path: Path) -> None:
    path = write_adapter(tmp_path, shared_checkpoint("mixtral"), targets=("q_proj",))
    assert read_adapter(path, model_config("mixtral"), max_rank=16).rank == 4
    configured(target_modules=["q_proj", "gate"])(path)
    with pytest.raises(ModelLoadError, match="names 'gate', which is no matrix"):
        read_adapter(path, model_config("mixtral"), max_rank=16)


OF_EXPERTS: dict[str, tuple[Change, str]] = {
    "a router": (configured(target_parameters=["mlp.gate.weight"]), "names 'mlp.gate.weight', which is no parameter"),
    "half a pair": (
        stored(lambda t: t.pop("base_model.model.model.layers.0.mlp.experts.lora_B.weight")),
        r"experts\.down_proj\.lora_B is missing",
    ),
    "not targeted": (
        configured(target_parameters=["experts.gate_up_proj"]),
        r"experts\.base_layer\.lora_A\.weight: it belongs to no matrix",
    ),
    "of another rank": (configured(rank_pattern={"gate_up_proj": 3}), r"gate_up_proj\.lora_A has shape \[64, 64\]"),
    "twice": (
        stored(
            lambda t: t.update(
                {
                    f"base_model.model.model.layers.0.mlp.experts.1.down_proj.lora_{part}.weight": torch.ones(shape)
                    for part, shape in (("A", (4, 40)), ("B", (64, 4)))
                }
            )
        ),
        "down_proj is adapted twice, as a whole and by expert",
    ),
    "before 0.19": (
        stored(
            lambda t: t.update(
                {
                    "base_model.model.model.layers.0.mlp.experts.lora_A.weight": torch.ones(32, 64),
                    "base_model.model.model.layers.0.mlp.experts.lora_B.weight": torch.ones(40, 32),
                }
            )
        ),
        "inputs and outputs in the places that they had before PEFT 0.19",
    ),
}


@pytest.mark.parametrize("name", OF_EXPERTS)
def test_a_bad_adapter_of_all_experts_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    path = fused(tmp_path / "fused", write_adapter(tmp_path / "each", shared_checkpoint("qwen3_moe")))
    assert len(read_adapter(path, model_config("qwen3_moe"), max_rank=16).matrices) == 2 * 3 + 4 + 2
    change, message = OF_EXPERTS[name]
    change(path)
    with pytest.raises(ModelLoadError, match=message) as refused:
        read_adapter(path, model_config("qwen3_moe"), max_rank=16)
    assert "\n" not in str(refused.value)


def test_experts_of_one_layer_are_alike(tmp_path: Path) -> None:
    path = write_adapter(tmp_path, shared_checkpoint("mixtral"), ranks={"1.w2": 2})
    configured(rank_pattern={}, alpha_pattern={"1.w2": 3.0})(path)
    with pytest.raises(
        ModelLoadError, match=r"experts\.1\.down_proj has rank 4 and scale 0\.75, another expert 4 and 2"
    ):
        read_adapter(path, model_config("mixtral"), max_rank=16)


def test_the_gate_of_attention_is_refused(tmp_path: Path) -> None:
    """It has the name of an MLP's gate, which adapters do add to."""
    path = write_adapter(tmp_path, shared_checkpoint("afmoe"), targets=("gate_proj",))
    read_adapter(path, model_config("afmoe"), max_rank=16)
    name = "base_model.model.model.layers.0.self_attn.gate_proj.lora_A.weight"
    stored(lambda tensors: tensors.update({name: torch.zeros(4, 64)}))(path)
    with pytest.raises(ModelLoadError, match=r"self_attn\.gate_proj.*: it belongs to no matrix that adapters add to"):
        read_adapter(path, model_config("afmoe"), max_rank=16)


@pytest.mark.parametrize("targets", ["all-linear", r".*\.(q|k)_proj", None])
def test_where_an_expression_says_which_the_tensors_do(targets: str | None, tmp_path: Path) -> None:
    path = write_adapter(tmp_path, shared_checkpoint("qwen3"), target_modules=targets, kasa_config=None)
    assert len(read_adapter(path, model_config(), max_rank=16).matrices) == 8  # of two layers


def test_scales_and_ranks_go_by_the_first_pattern_that_is_an_end(tmp_path: Path) -> None:
    path = write_adapter(
        tmp_path,
        shared_checkpoint("qwen3"),
        targets=("q_proj", "o_proj"),
        ranks={"o_proj": 2},
        alpha=6,
        alpha_pattern={"layers.1.self_attn.q_proj": 10, "^q_proj": 99, "q_proj": 3},
        use_rslora=True,
    )
    matrices = read_adapter(path, model_config(), max_rank=16).matrices
    (q0,), (o0,), (q1,), (o1,) = (matrices[site].parts for site in sorted(matrices))
    scales = [part.scale for part in (q0, o0, q1, o1)]
    assert scales == pytest.approx([3 / 2, 6 / math.sqrt(2), 10 / 2, 6 / math.sqrt(2)])
    assert [len(part.shrink) for part in (q0, o0, q1, o1)] == [4, 2, 4, 2]


def test_the_digest_is_that_of_both_files(tmp_path: Path) -> None:
    def digest(seed: int = 0, **keys: Any) -> str:
        path = write_adapter(tmp_path, shared_checkpoint("qwen3"), seed=seed, **keys)
        return read_adapter(path, model_config(), max_rank=16).digest

    same = digest()
    assert same == digest()
    assert len({same, digest(seed=1), digest(alpha=4.0), digest(lora_dropout=0.5)}) == 4


def test_names_of_wrappers_are_read(tmp_path: Path) -> None:
    prefix = "base_model.model.model.language_"
    path = write_adapter(tmp_path, shared_checkpoint("qwen3"), prefix=prefix)
    assert len(read_adapter(path, model_config(), max_rank=16).matrices) == 8
