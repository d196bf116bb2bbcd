"""Proof that a class of transformers, computed in steps over the pool, gives what its plain forward pass gives.

A model of the same class with a shrunken configuration and random weights runs both ways in float32, over five mixed
steps with chunked prompts that are longer than its windows. Models that can be served differ in the seventh digit and
others in the second, so nothing depends on where the limit between them lies.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quire_engine.contract.errors import ModelLoadError
from quire_engine.contract.kv_groups import one_group
from quire_engine.execution.model_input import ModelInput
from quire_engine.execution.models.fallback.attention import uses_kernels, with_plain_pool
from quire_engine.execution.models.fallback.decoder import FallbackDecoder
from quire_engine.execution.models.fallback.facts import Facts, StepArguments, learn_facts
from quire_engine.execution.models.fallback.model_class import IMPLEMENTATION, ModelClass, in_steps
from quire_engine.execution.models.fallback.weights import parameters, part_of
from quire_engine.execution.models.matrix_parts import Part
from quire_kernels.kernel_set import KernelSet, LinearWeight
from quire_kernels.reference import REFERENCE
from quire_kernels.trusted_folder import open_trusted, trusted

_log = logging.getLogger(__name__)

TOLERANCE = 1e-4  # of the largest logit
_BLOCK, _NUM_BLOCKS = 16, 32
_LENGTHS = (14, 26, 8)  # of three sequences
_POSITIONS = 32
# Steps of (sequence, tokens): a prompt in chunks, one that is longer than every window, one that comes later.
_SCHEDULE = (
    ((0, 7), (1, 19)),
    ((0, 4), (1, 5), (2, 5)),
    ((0, 1), (1, 1), (2, 1)),
    ((2, 1), (0, 1)),
    ((1, 1), (2, 1), (0, 1)),
)
_WIDEST = 1 << 20  # a window that no sequence fills
# Numbers of a shrunken configuration, by the names that configurations have for them.
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "ffn_hidden_size"), 96),
    **dict.fromkeys(("intermediate_size_mlp", "block_ff_dim", "dense_intermediate_size"), 96),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(
        ("head_dim", "kv_channels", "v_head_dim", "qk_nope_head_dim", "global_head_dim", "index_head_dim"), 16
    ),
    **dict.fromkeys(("swa_head_dim", "swa_v_head_dim", "attention_head_dim"), 16),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 128),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 256),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("expert_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_latent_size"), 32),
    **dict.fromkeys(("q_lora_rank",), 24),
    **dict.fromkeys(("kv_lora_rank", "mamba_d_state", "ssm_state_size", "linear_key_head_dim"), 16),
    **dict.fromkeys(("linear_value_head_dim", "linear_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "laurel_rank", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("n_group", "index_n_heads", "linear_num_key_heads", "zero_expert_num"), 2),
    **dict.fromkeys(
        ("linear_num_value_heads", "linear_num_heads", "mamba_n_heads", "mamba_num_heads", "mamba_dt_rank"), 4
    ),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 32),
    **dict.fromkeys(("topk_group", "first_k_dense_replace", "mamba_n_groups", "n_groups", "num_dense_layers"), 1),
    **dict.fromkeys(("moe_layer_start_index", "n_shared_experts", "moe_num_shared_experts"), 1),
    "mamba_d_ssm": 128,
    "mamba_expand": 2,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
}
_KEY_HEADS = ("num_key_value_heads", "num_global_key_value_heads", "swa_num_key_value_heads", "num_kv_heads")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")
_WINDOWS = ("sliding_window", "attention_chunk_size", "index_topk", "sliding_window_size", "window_size")
_SHARED = "num_kv_shared_layers"
_LEAST_LAYERS = 4
_MOST_PARAMETERS = 60_000_000  # of a shrunken model: a second or two of work


def shrunk(made: ModelClass, max_model_len: int) -> ModelClass:
    """Return the class with a configuration of a few small layers of each kind.

    A window that a sequence of `max_model_len` tokens can leave becomes one that the proof's sequences leave.
    """
    config = copy.deepcopy(made.config)
    text = config.get_text_config(decoder=True)
    values = _shrunk(text.to_dict(), max_model_len)
    small = type(text).from_dict(values)
    if text is not config:
        key = next(key for key in config.sub_configs if getattr(config, key) is text)
        values = config.to_dict() | {key: small.to_dict()}
        small = type(config).from_dict(values)
    return ModelClass(made.kind, small)


def _shrunk(values: dict[str, Any], max_model_len: int) -> dict[str, Any]:
    layers = next((values[key] for key in _LAYERS if isinstance(values.get(key), int)), 0)
    few = _few_layers(values, layers)
    found = dict(values)
    for key, value in values.items():
        if isinstance(value, list) and len(value) == layers > 1:
            found[key] = [SIZES[key]] * few if key == "intermediate_size" else value[:few]
        elif isinstance(value, dict) and _is_by_layer(value):
            found[key] = {each: _shrunk(value[each], max_model_len) for each in value if int(each) < few}
        elif key in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            found[key] = _shrunk_rope(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            found[key] = few if key in _LAYERS else _shrunk_number(key, values, few, max_model_len)
    _agree(values, found)
    return found


def _shrunk_number(key: str, values: Mapping[str, Any], few: int, max_model_len: int) -> int:
    value: int = values[key]
    if key in _KEY_HEADS:
        heads = next((values[each] for each in ("num_attention_heads", "n_head", "n_heads") if values.get(each)), 0)
        return 1 if value == 1 else 4 if value == heads else 2
    if key in _WINDOWS:
        return 6 if value < max_model_len else _WIDEST
    if key in SIZES and value > 0:
        return SIZES[key]
    if key.endswith("_token_id") and value >= SIZES["vocab_size"]:
        return 0
    return min(value, few // 2) if key in (_SHARED, "max_window_layers") else value


def _agree(values: Mapping[str, Any], found: dict[str, Any]) -> None:
    """Keep sizes apart, or equal, that are so in the model's own configuration."""
    if "qk_rope_head_dim" in values and values.get("head_dim") == values["qk_rope_head_dim"]:
        found["head_dim"] = found["qk_rope_head_dim"]
    if isinstance(values.get("qk_head_dim"), int):
        found["qk_head_dim"] = found["qk_nope_head_dim"] + found["qk_rope_head_dim"]
    if values.get("global_head_dim") and values["global_head_dim"] != values.get("head_dim"):
        found["global_head_dim"] = 32
    if values.get("attn_layer_indices"):
        found["attn_layer_indices"] = [1, 3]
    if isinstance(values.get("eos_token_id"), list):
        found["eos_token_id"] = 2


def _is_by_layer(values: dict[Any, Any]) -> bool:
    return bool(values) and all(str(key).isdigit() and isinstance(each, dict) for key, each in values.items())


def _few_layers(values: Mapping[str, Any], layers: int) -> int:
    """The number of first layers among which each kind occurs."""
    few = min(layers, _LEAST_LAYERS)
    for value in values.values():
        if isinstance(value, list) and len(value) == layers and all(isinstance(each, str) for each in value):
            few = max(few, *(value.index(each) + 1 for each in value))
    # Layers that read the keys of others need one of their kind before them.
    return 2 * few if values.get(_SHARED) else few


def _shrunk_rope(rope: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    share = rope.get("partial_rotary_factor")
    half = int(16 * (share if isinstance(share, int | float) else 1.0)) // 2
    for key, value in rope.items():
        if isinstance(value, dict):
            found[key] = _shrunk_rope(value)
        elif key == "mrope_section":
            found[key] = [half - 2 * (half // 3), half // 3, half // 3]
        elif isinstance(value, list):
            found[key] = value[:half]
        else:
            found[key] = value
    return found


def prove(made: ModelClass, max_model_len: int, folder: Path | None) -> None:
    """Raises ModelLoadError, with the layer that differs. `folder` remembers what was proven."""
    small = shrunk(made, max_model_len)
    key = _key(small)
    if folder is not None and _is_proven(folder, key):
        return
    _log.info("proving that %s can be computed in steps", made.name)
    with in_steps(made):
        difference, layer = compare(small)
    if not difference <= TOLERANCE:
        raise ModelLoadError(
            f"{made.name} of {IMPLEMENTATION} cannot be served: a small model of its kind, computed in steps over"
            f" a paged cache, differs from the plain one by {difference:.1e} of the largest logit, first in {layer};"
            f" a mask, a window or a state must be missing{_advice(made, max_model_len)}"
        )
    if folder is not None:
        _remember(folder, key)


def _advice(made: ModelClass, max_model_len: int) -> str:
    values = made.text_config.to_dict()
    windows = [values[key] for key in _WINDOWS if isinstance(values.get(key), int) and 0 < values[key] < max_model_len]
    return f"; with max_model_len of {min(windows)} or less it may do without" if windows else ""


def compare(made: ModelClass) -> tuple[float, str]:
    """The greatest difference as a share of the largest logit, and the first layer whose output differs."""
    dtype, source = torch.float32, torch.Generator().manual_seed(1)
    facts = learn_facts(made, dtype)
    if facts.parameters.total > _MOST_PARAMETERS:
        raise ModelLoadError(
            f"{made.name} of {IMPLEMENTATION} cannot be proven: no small model of its kind can be made, the smallest"
            f" has {facts.parameters.total:,} parameters"
        )
    ids = [torch.randint(3, 120, (length,), generator=source) for length in _LENGTHS]
    plain = made.without_parameters(dtype)
    values = _fill(plain, facts)
    wanted, wanted_layers = _plainly(plain, plain.get_submodule(facts.body), ids)
    kernels = REFERENCE if uses_kernels(facts, _BLOCK) else with_plain_pool(REFERENCE, facts)
    stepped = made.without_parameters(dtype)
    decoder = FallbackDecoder(
        facts,
        stepped,
        kernels,
        layout=one_group(facts.kv_heads),
        dtype=dtype,
        block_size=_BLOCK,
        max_model_len=_POSITIONS,
        max_num_seqs=len(ids),
        sources=lambda dtype: MemorySource(values, kernels, dtype),
        has_buffer=lambda _: False,
    )
    got, got_layers = _in_steps(decoder, stepped.get_submodule(facts.body), kernels, ids)
    largest = max(logits.abs().max().item() for logits in wanted)
    difference = max((a - b).abs().max().item() for a, b in zip(got, wanted, strict=True)) / largest
    return (float("inf") if math.isnan(difference) else difference), _first_difference(wanted_layers, got_layers)


class MemorySource:
    """See `models.matrix_parts.WeightSource`: random values by the parameters' names."""

    def __init__(self, values: Mapping[str, Tensor], kernels: KernelSet, dtype: torch.dtype) -> None:
        self._values, self._kernels, self._dtype = values, kernels, dtype

    def tensor(self, name: str, *, wide: bool = False) -> Tensor:
        dtype = torch.float32 if wide else self._dtype
        return part_of(name, self._values.__getitem__).to(dtype, copy=True)

    def matrix(self, place: str, weights: Sequence[Part], biases: Sequence[Part]) -> LinearWeight:
        del place
        return self._kernels.pack_linear(self._rows(weights), self._rows(biases) if biases else None)

    def gate_up(self, place: str, gate: Sequence[Part], up: Sequence[Part], biases: Sequence[Part]) -> LinearWeight:
        del place
        return self._kernels.pack_gate_up(self._rows(gate), self._rows(up), self._rows(biases) if biases else None)

    def _rows(self, parts: Sequence[Part]) -> Tensor:
        return torch.cat([piece for part in parts for piece in part.pieces(self.tensor(part.name))])

    def stored_table(self, place: str, name: str) -> LinearWeight | None:
        del place, name
        return None

    def head(self, place: str, name: str, embedding: Tensor | None, rows: slice | None = None) -> LinearWeight:
        del embedding, rows
        return self.matrix(place, [Part(name)], [])


def _fill(model: Any, facts: Facts) -> dict[str, Tensor]:
    """Random values for every parameter that text passes, by each of its names."""
    generator, values = torch.Generator().manual_seed(0), {}
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    for names, parameter in parameters(model, facts):
        random = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() < 2:
            is_norm = "norm" in names[0].lower() or "ln_" in names[0]
            value = 1.0 + 0.1 * random if is_norm else 0.2 * random
        else:
            is_table = any(table is not None and parameter is table.weight for table in tables)
            value = random if is_table or "embed" in names[0] else random * parameter.shape[-1] ** -0.5
        filled = nn.Parameter(value.to(parameter.dtype), requires_grad=False)
        for name in names:
            holder, _, attribute = name.rpartition(".")
            model.get_submodule(holder)._parameters[attribute] = filled
            values[name] = filled.data
    return values


def _layers(body: nn.Module) -> list[tuple[str, nn.Module]]:
    lists = [(name, each) for name, each in body.named_modules() if isinstance(each, nn.ModuleList)]
    name, longest = max(lists, key=lambda each: (len(each[1]), -len(each[0])), default=("", nn.ModuleList()))
    return [(f"{name}.{index}", module) for index, module in enumerate(longest)]


@torch.inference_mode()
def _plainly(model: Any, body: nn.Module, ids: Sequence[Tensor]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    found, layers = [], []
    for tokens in ids:
        outputs: dict[str, Tensor] = {}
        handles = _watch(body, outputs)
        arguments = StepArguments(model.forward)(tokens[None], torch.arange(len(tokens))[None])
        found.append(model(**arguments).logits[0].float())
        layers.append(outputs)
        for handle in handles:
            handle.remove()
    return found, layers


def _watch(body: nn.Module, outputs: dict[str, Tensor]) -> list[Any]:
    def keep(name: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            del module, args
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor) and first.dim() == 3:
                outputs.setdefault(name, first[0].clone())

        return hook

    return [module.register_forward_hook(keep(name)) for name, module in _layers(body)]


def _in_steps(
    decoder: FallbackDecoder, body: nn.Module, kernels: KernelSet, ids: Sequence[Tensor]
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    facts = decoder.config
    kv = kernels.new_kv(
        _NUM_BLOCKS, facts.num_layers, facts.num_kv_heads, _BLOCK, facts.head_dim, torch.float32, torch.device("cpu")
    )
    starts = [0] * len(ids)
    found: list[list[Tensor]] = [[] for _ in ids]
    layers: list[dict[str, list[Tensor]]] = [{} for _ in ids]
    for rows in _SCHEDULE:
        step = _step(ids, rows, starts)
        outputs: dict[str, Tensor] = {}
        handles = _watch(body, outputs)
        logits = decoder.logits(decoder.forward(step, kv))
        for handle in handles:
            handle.remove()
        at = 0
        for sequence, count in rows:
            found[sequence].append(logits[at : at + count])
            for name, output in outputs.items():
                layers[sequence].setdefault(name, []).append(output[at : at + count])
            starts[sequence] += count
            at += count
    joined = [{name: torch.cat(parts) for name, parts in each.items()} for each in layers]
    return [torch.cat(parts) for parts in found], joined


def _step(ids: Sequence[Tensor], rows: Sequence[tuple[int, int]], starts: Sequence[int]) -> ModelInput:
    """One step; sequence s has the blocks 2 s + 2 and 2 s + 1, in this order, so that none lies in place by chance."""
    counts, ends = [count for _, count in rows], [starts[sequence] + count for sequence, count in rows]
    positions = torch.cat([torch.arange(end - count, end) for count, end in zip(counts, ends, strict=True)])
    tables = torch.tensor([[2 * sequence + 2, 2 * sequence + 1] for sequence, _ in rows], dtype=torch.int32)
    blocks = torch.cat(
        [tables[i, torch.arange(end - n, end) // _BLOCK] for i, (n, end) in enumerate(zip(counts, ends, strict=True))]
    )
    return ModelInput(
        input_ids=torch.cat([ids[s][end - n : end] for (s, n), end in zip(rows, ends, strict=True)]),
        positions=positions,
        kv_slots=blocks.long() * _BLOCK + positions % _BLOCK,
        query_starts=torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
        context_lens=torch.tensor(ends, dtype=torch.int32),
        block_tables=tables,
        query_lens=tuple(counts),
        kv_lens=tuple(ends),
        max_query_len=max(counts),
        max_context_len=max(ends),
        sample_rows=torch.arange(len(positions)),
        sampled=None,
        sequence_ids=tuple(sequence for sequence, _ in rows),
        forks=((),) * len(rows),
    )


def _first_difference(wanted: list[dict[str, Tensor]], got: list[dict[str, Tensor]]) -> str:
    for name in wanted[0]:
        for a, b in zip(wanted, got, strict=True):
            if name not in b or a[name].shape != b[name].shape:
                continue
            if not (a[name] - b[name]).abs().max() <= TOLERANCE * a[name].abs().max():
                return name
    return "the head"


def _key(made: ModelClass) -> str:
    """All that a proof depends on."""
    known = {
        "class": made.name,
        "configuration": made.config.to_json_string(use_diff=False),
        "versions": [IMPLEMENTATION, torch.__version__, version("quire")],
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def _file(folder: Path, key: str) -> Path:
    return folder / f"{key[:32]}.proof"


def _is_proven(folder: Path, key: str) -> bool:
    with suppress(OSError):
        handle = open_trusted(_file(folder.expanduser(), key))
        try:
            return os.read(handle, len(key) + 1) == key.encode()
        finally:
            os.close(handle)
    return False


def _remember(folder: Path, key: str) -> None:
    """A folder that cannot be written to, or that others may write to, costs the time of a proof at each start."""
    with suppress(OSError, RuntimeError):
        path = _file(trusted(folder.expanduser()), key)
        path.unlink(missing_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.write(handle, key.encode())
        finally:
            os.close(handle)
