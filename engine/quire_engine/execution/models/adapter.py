"""Reads a LoRA adapter as PEFT writes it: adapter_config.json and adapter_model.safetensors.

Promises: every key of the configuration is read, harmless or refused by name; nothing but these two files is opened,
and the digest is that of the very bytes that were read. A failure is a ModelLoadError of one line.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from quire_engine.contract.errors import ModelLoadError
from quire_engine.execution.models.adapter_pairs import Pair, Settings, check_tensor
from quire_engine.execution.models.config import ModelConfig
from quire_engine.execution.models.expert_adapters import ExpertStacks, check_parameters, expert_matrices
from quire_engine.execution.models.experts import common_name
from quire_engine.execution.models.matrix_parts import Part
from quire_engine.execution.models.sites import SITES, Site, place_of, site_of
from quire_engine.execution.models.weights import expected_shapes, gate_up_parts, qkv_parts
from quire_engine.plain_files import read_plain
from quire_kernels.low_rank import AdaptedProduct, LowRankExperts, LowRankMatrix, LowRankPart

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_LARGEST = torch.finfo(torch.float32).max  # what kernels multiply with
_EXPERT_MATRICES = ("gate_proj", "up_proj", "down_proj")
_STACKED = re.compile(r"\.experts\.(base_layer\.)?lora_")  # matrices of all experts of a layer together
_MOST_CONFIG_BYTES = 1 << 20
_MOST_HEADER_BYTES = 8 << 20

# Of training, of provenance, or of other kinds of adapters.
_HARMLESS = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout"),
        *("task_type", "exclude_modules", "layers_to_transform", "layers_pattern", "loftq_config", "eva_config"),
        *("corda_config", "lora_ga_config", "megatron_config", "megatron_core", "qalora_group_size", "runtime_config"),
        *("ensure_weight_tying",),
    }
)
# What must be off, and why.
_OFF = {
    "use_dora": "DoRA scales the rows of the model's own matrices",
    "use_qalora": "QALoRA pools the inputs",
    "use_bdlora": "block-diagonal adapters are not served",
    "modules_to_save": "whole modules are not replaced; merge them into the checkpoint",
    "trainable_token_indices": "embeddings are not replaced; merge them into the checkpoint",
    "layer_replication": "layers are not repeated",
    "lora_bias": "an adapter's own biases are not served",
    "fan_in_fan_out": "it is for matrices that are stored transposed",
    "alora_invocation_tokens": "activated LoRA changes within a prompt",
    "arrow_config": "adapters are not mixed",
    "monteclora_config": "adapters are not drawn at random",
    "velora_config": "it is no plain LoRA",
    "kasa_config": "it changes the model's own weights first",
}
# Begin by changing the model's own weights, so that the adapter fits those alone.
_CHANGING = ("pissa", "olora", "loftq", "corda", "lora_ga")
_READ = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "bias"),
        *("init_lora_weights", "target_parameters", "peft_version"),
    }
)
_MLP = r"mlp(?:\.shared_experts?)?"
_EXPERTS = r"(?:(?:mlp|block_sparse_moe)\.)?experts(?:\.\d{1,5}\.\w{1,64}|\.base_layer)?"
_TENSOR = re.compile(
    r"base_model\.model\.(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d{1,6})\."
    rf"((?:self_attn|{_MLP})\.\w{{1,64}}|{_EXPERTS})\.lora_([AB])\.weight"
)
_LITERAL = re.compile(r"\^?[\w.\\]{1,256}\$?")


class ReadAdapter(NamedTuple):
    """An adapter's matrices, by site."""

    digest: str
    rank: int  # the largest
    matrices: dict[int, LowRankMatrix | LowRankExperts]


def read_adapter(path: Path, config: ModelConfig, *, max_rank: int) -> ReadAdapter:
    """The adapter in a directory, checked against the model. Raises ModelLoadError."""
    if not os.path.isdir(path):
        raise ModelLoadError(f"{path}: there is no such directory of an adapter")
    weights = path / WEIGHTS
    if not weights.exists() and (path / PICKLE).exists():
        raise ModelLoadError(f"{path / PICKLE}: pickles are not read; save the adapter as {WEIGHTS}")
    plain = _read(path / CONFIG, _MOST_CONFIG_BYTES, "")
    settings = _settings(path / CONFIG, plain, max_rank)
    shapes = _module_shapes(config)
    _check_targets(path / CONFIG, settings, shapes)
    check_parameters(path / CONFIG, settings, config)
    most = 4 * max_rank * sum(rows + columns for rows, columns in shapes.values()) + _MOST_HEADER_BYTES
    data = _read(weights, most, f"more than the adapted matrices can have with --max-lora-rank {max_rank}")
    pairs, stacks = _pairs(weights, data, settings, config, shapes)
    if not pairs and not stacks:
        raise ModelLoadError(f"{weights}: it has no matrices for this model")
    digest = hashlib.sha256(len(plain).to_bytes(8, "little") + plain + data).hexdigest()
    ranks = [len(pair.shrink) for pair in pairs.values()] + [part.shrink.shape[1] for part in stacks.values()]
    matrices: dict[int, LowRankMatrix | LowRankExperts] = dict(_matrices(config, pairs, shapes))
    matrices |= expert_matrices(weights, config, pairs, stacks)
    return ReadAdapter(digest=digest, rank=max(ranks), matrices=matrices)


def most_adapter_bytes(config: ModelConfig, rank: int, itemsize: int) -> int:
    """The memory of an adapter of this rank that adds to all matrices, at most."""
    values = sum(rows + columns + 32 for rows, columns in _module_shapes(config).values())
    return rank * values * itemsize


def _read(file: Path, most: int, why: str) -> bytes:
    try:
        return read_plain(file, most)
    except OSError as error:
        reason = f", {why}" if why and error.errno == errno.EFBIG else ""
        raise ModelLoadError(f"{file}: cannot be read: {error.strerror}{reason}") from None


def _module_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of each matrix that adapters may add to, by its name without `.weight`."""
    found = {}
    for name, shape in expected_shapes(config).items():
        module = re.fullmatch(
            r"(model\.layers\.\d+\."
            rf"(?:self_attn\.(?:q|k|v|qkv|o)|{_MLP}\.(?:gate|up|gate_up|down)|mlp\.experts\.\d+\.(?:gate|up|down))_proj)"
            r"\.weight",
            name,
        )
        if module is not None:
            found[module[1]] = (shape[0], shape[1])
    return found


class _Wrong(Exception):
    """A key of the configuration, and what is wrong with its value."""


def _settings(file: Path, data: bytes, max_rank: int) -> Settings:
    try:
        plain = json.loads(data)
    except (UnicodeDecodeError, ValueError, RecursionError):
        raise ModelLoadError(f"{file}: it is not JSON") from None
    if not isinstance(plain, dict):
        raise ModelLoadError(f"{file}: it is not an object")
    try:
        _check_kind(plain)
        return _checked(plain, max_rank)
    except _Wrong as wrong:
        key, reason = wrong.args
        raise ModelLoadError(f"{file}: {key}={json.dumps(plain.get(key))[:80]}: {reason}") from None


def _check_kind(plain: Mapping[str, Any]) -> None:
    """Refuse what is not plain LoRA."""
    if plain.get("peft_type") != "LORA":
        raise _Wrong("peft_type", "adapters are served of type LORA alone")
    for key, value in plain.items():
        if key in _OFF and value:
            raise _Wrong(key, f"it is not supported: {_OFF[key]}")
        if key not in _OFF and key not in _HARMLESS and key not in _READ:
            raise _Wrong(key, "it is unknown, so the adapter may mean something else")
    if plain.get("bias", "none") != "none":
        raise _Wrong("bias", "it is not supported: the model's biases are not replaced")
    begins = plain.get("init_lora_weights", True)
    if isinstance(begins, str) and begins.startswith(_CHANGING):
        raise _Wrong("init_lora_weights", "it changes the model's own weights; convert the adapter to plain LoRA")


def _checked(plain: Mapping[str, Any], max_rank: int) -> Settings:
    targets = plain.get("target_modules")
    if not (targets is None or isinstance(targets, str) or _are_names(targets)):
        raise _Wrong("target_modules", "it is no list of names")
    parameters = plain.get("target_parameters") or []
    if not _are_names(parameters):
        raise _Wrong("target_parameters", "it is no list of names")
    rank, alpha, by_root = plain.get("r", 8), plain.get("lora_alpha", 8), plain.get("use_rslora", False)
    if not _is_rank(rank):
        raise _Wrong("r", "it is no rank")
    if not _is_number(alpha):
        raise _Wrong("lora_alpha", "it is no finite number in float32")
    if not isinstance(by_root, bool):
        raise _Wrong("use_rslora", "it is neither true nor false")
    ranks = _patterns(plain, "rank_pattern", _is_rank)
    for key, most in (("r", rank), ("rank_pattern", max(ranks.values(), default=0))):
        if most > max_rank:
            raise _Wrong(key, f"rank {most:g} is more than --max-lora-rank {max_rank}")
    return Settings(
        rank=rank,
        alpha=float(alpha),
        by_root=by_root,
        ranks=ranks,
        alphas=_patterns(plain, "alpha_pattern", _is_number),
        targets=() if targets is None or isinstance(targets, str) else tuple(targets),
        parameters=tuple(parameters),
        version=str(plain.get("peft_version") or ""),
    )


def _patterns(plain: Mapping[str, Any], key: str, is_valid: Callable[[Any], bool]) -> dict[str, float]:
    found = plain.get(key) or {}
    if not isinstance(found, dict) or not all(map(is_valid, found.values())):
        raise _Wrong(key, "it is no object of numbers")
    for pattern in found:
        if not _LITERAL.fullmatch(pattern):
            raise _Wrong(key, f"{pattern[:80]!r} is an expression; names of modules, or their ends, are supported")
    return found


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 1 << 16


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _expert_name(target: str) -> str:
    """The common name of an expert's matrix that families call otherwise, such as w1."""
    return common_name(f"model.layers.0.mlp.experts.0.{target}.")[:-1].rpartition(".")[2]


def _check_targets(file: Path, settings: Settings, shapes: Mapping[str, tuple[int, int]]) -> None:
    for target in settings.targets:
        meant = f".experts.0.{_expert_name(target)}"
        if not any(module == target or module.endswith((f".{target}", meant)) for module in shapes):
            known = ", ".join(dict.fromkeys(module.rpartition(".")[2] for module in shapes))
            raise ModelLoadError(
                f"{file}: target_modules names {target[:80]!r}, which is no matrix of this model that adapters add to;"
                f" those are {known}"
            )


def _pairs(
    file: Path, data: bytes, settings: Settings, config: ModelConfig, shapes: Mapping[str, tuple[int, int]]
) -> tuple[dict[str, Pair], dict[str, LowRankPart]]:
    """A and B of each adapted module, and of each adapted parameter of all experts of a layer."""
    try:
        tensors = load_tensors(data)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise ModelLoadError(f"{file}: it is no file of safetensors: {error}") from None
    if tensors:
        _check_complete(file, settings, tensors.keys())
    found: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    own_names, stacks = {}, ExpertStacks(file, config, settings)
    for name, tensor in sorted(tensors.items()):
        matched = _TENSOR.fullmatch(name)
        own = "" if matched is None else f"model.layers.{int(matched[1])}.{matched[2]}"
        module = common_name(own + ".")[:-1]
        if matched is not None and stacks.take(module, matched[3], tensor):
            continue
        if matched is None or module not in shapes:
            raise ModelLoadError(f"{file}: tensor {name[:160]}: it belongs to no matrix that adapters add to")
        found[module][matched[3]], own_names[module] = tensor, own
    pairs = {}
    for module, both in found.items():
        rank, (rows, columns) = settings.rank_of(own_names[module]), shapes[module]
        shrink = both.get("A")
        if shrink is not None and shrink.dim() == 2 and shrink.shape[1] == columns and len(shrink) != rank:
            raise ModelLoadError(
                f"{file}: {module}.lora_A has rank {len(shrink)}, and {CONFIG} says {rank} (r or rank_pattern)"
            )
        for part, shape in (("A", (rank, columns)), ("B", (rows, rank))):
            check_tensor(file, f"{module}.lora_{part}", both.get(part), shape)
        pairs[module] = Pair(both["A"], both["B"], settings.scale_of(own_names[module]))
    return pairs, stacks.parts()


def _check_complete(file: Path, settings: Settings, names: Collection[str]) -> None:
    """Refuse a file without any matrix of a module that the configuration names: it is of another training or cut."""
    has_stacks = any(_STACKED.search(name) for name in names)
    for target in settings.targets:
        if has_stacks and _expert_name(target) in _EXPERT_MATRICES:
            continue
        if not any(f".{target}.lora_" in name for name in names):
            raise ModelLoadError(
                f"{file}: it has no tensor of {target[:80]!r}, which target_modules of {CONFIG} names; the file belongs"
                " to another configuration, or is incomplete"
            )


def _matrices(
    config: ModelConfig, pairs: Mapping[str, Pair], shapes: Mapping[str, tuple[int, int]]
) -> Iterator[tuple[int, LowRankMatrix]]:
    """Yield an adapter's matrices with their sites; a module's rows lie where those of its matrix do."""
    for site, product, parts in _products(config, shapes):
        made = []
        for part, row in zip(parts, product.starts, strict=True):
            pair = pairs.get(part.name)
            if pair is not None:
                expand = part.of(pair.expand)
                made.append(LowRankPart(first_row=row, shrink=pair.shrink, expand=expand, scale=pair.scale))
        if made:
            rows, columns, gate_up = product.num_rows, product.num_inputs, place_of(site) == "gate_up"
            yield site, LowRankMatrix(num_rows=rows, num_inputs=columns, gate_up=gate_up, parts=tuple(made))


def adapted_products(config: ModelConfig) -> list[AdaptedProduct | None]:
    """Return by site the products that adapters may add to, without chosen experts; None: no such product."""
    found: list[AdaptedProduct | None] = [None] * (config.num_layers * len(SITES))
    for site, product, _ in _products(config, _module_shapes(config)):
        found[site] = product
    return found


def _products(
    config: ModelConfig, shapes: Mapping[str, tuple[int, int]]
) -> Iterator[tuple[int, AdaptedProduct, list[Part]]]:
    """Site, product and the modules whose rows its parts are."""
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        places: list[tuple[Site, list[Part]]] = [
            ("qkv", qkv_parts(config, index)),
            ("o", [Part(prefix + "self_attn.o_proj")]),
        ]
        if config.has_mlp(index):
            places += [("gate_up", list(gate_up_parts(config, index))), ("down", [Part(prefix + "mlp.down_proj")])]
        elif config.experts is not None and config.experts.shared_inner:
            shared = f"{prefix}mlp.{config.experts.entry.shared}."
            gate_up_of_shared = [Part(shared + "gate_proj"), Part(shared + "up_proj")]
            places += [("gate_up", gate_up_of_shared), ("down", [Part(shared + "down_proj")])]
        for place, parts in places:
            rows = [len(range(shapes[part.name][0])[part.start : part.stop]) for part in parts]
            starts = tuple(accumulate(rows[:-1], initial=0))
            product = AdaptedProduct(num_rows=sum(rows), num_inputs=shapes[parts[0].name][1], starts=starts)
            yield site_of(index, place), product, parts
