"""The memory of KV caches, computed from a checkpoint's config.json.

Promises: exact bytes; a config.json that lacks a value is refused with the name of the missing key. Must not know:
torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quire_engine.contract.errors import ConfigError, ModelLoadError
from quire_engine.contract.kv_groups import KVGroup, KVHeads, KVLayout, Window, kv_layout
from quire_engine.gguf import typed_name
from quire_engine.ranks import heads_of_rank

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "float8_e4m3fn": 1, "int8": 1}
# Names of the same size in different model families.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_WIDTH = ("hidden_size", "n_embd", "d_model")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_head_kv")
_LENGTH = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
_ALL = "transformers' code, with --model-impl transformers, holds all in each"
_MOST_BYTES = 64 << 20  # most bytes of a config.json


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """The values that determine the size of a cache."""

    layers: int
    kv_heads: int
    head_dim: int
    bytes_per_value: int
    values_per_token: int = 0  # per layer, where keys and values are stored together (MLA); 0: 2 * heads * head_dim
    max_len: int = 0  # positions; 0: unknown
    windows: tuple[Window, ...] = ()  # of each layer; empty: none has one
    own_heads: Mapping[int, KVHeads] = field(default_factory=dict)  # of layers that have others than the usual ones

    @property
    def heads(self) -> tuple[KVHeads, ...]:
        """The KV heads of each layer."""
        usual = KVHeads(self.kv_heads, self.head_dim)
        return tuple(self.own_heads.get(layer, usual) for layer in range(self.layers))

    @property
    def layout(self) -> KVLayout:
        """The pool's groups of layers."""
        return kv_layout(self.heads, self.windows or (None,) * self.layers, self.max_len or 1 << 20)

    @property
    def layer_bytes_per_token(self) -> int:
        """The bytes that a token takes in a layer with the usual heads."""
        return self._layer_bytes(KVHeads(self.kv_heads, self.head_dim))

    @property
    def bytes_per_token(self) -> int:
        return sum(map(self._layer_bytes, self.heads))

    def bytes_per_block(self, block_size: int) -> int:
        layout = self.layout
        parts = [part.num_layers * self._layer_bytes(part.heads) for part in layout.parts]
        return block_size * (sum(parts) if len(layout.windows) == 1 else max(parts))

    def of_rank(self, size: int) -> KVShape:
        """The shape of each of `size` ranks: its share of every layer's heads, at least one. Raises ConfigError."""
        if self.values_per_token:
            raise ConfigError(f"a latent of all heads is not divided among ranks: {_ALL}")
        uneven = next((each.number for each in self.heads if each.number % size and size % each.number), 0)
        if uneven:
            raise ConfigError(f"{uneven} KV heads are not divided among {size} ranks: {_ALL}")
        own = {layer: heads_of_rank((heads,), size)[0] for layer, heads in self.own_heads.items()}
        usual = heads_of_rank((KVHeads(self.kv_heads, self.head_dim),), size)[0]
        return replace(self, kv_heads=usual.number, own_heads=own)

    def stage_bytes(self, stages: int, block_size: int) -> list[int]:
        """The bytes of a block of `block_size` tokens that each of `stages` consecutive parts of the layers holds.

        Together they hold the keys and values of every layer once. Raises ConfigError.
        """
        if stages > self.layers:
            raise ConfigError(f"{self.layers} layers make at most {self.layers} stages, not {stages}")
        layers = [self._layer_bytes(heads) * block_size for heads in self.heads]
        ends = [self.layers * (stage + 1) // stages for stage in range(stages)]
        return [sum(layers[start:end]) for start, end in zip([0, *ends], ends, strict=False)]

    def seen_bytes(self, tokens: int) -> int:
        """Return the bytes of the keys and values that the row behind `tokens` tokens sees."""
        windows = self.windows or (None,) * self.layers
        return sum(
            min(tokens, window or tokens) * self._layer_bytes(heads)
            for window, heads in zip(windows, self.heads, strict=True)
        )

    def _layer_bytes(self, heads: KVHeads) -> int:
        return (self.values_per_token or 2 * heads.values) * self.bytes_per_value

    def blocks_for(self, tokens: int, block_size: int) -> int:
        """Blocks that a sequence of `tokens` tokens holds while it decodes."""
        return sum(KVGroup(window).settled_blocks(tokens, block_size) for window in self.layout.windows)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceMemory:
    """The memory of one sequence: of its tokens, of its blocks, and of a reservation for the whole length."""

    tokens: int
    max_len: int
    blocks: int
    slack: int  # token slots of its blocks, in all groups of layers, that hold no token that is seen
    live_bytes: int
    paged_bytes: int
    reserved_bytes: int

    @property
    def ratio(self) -> float:
        """Reserved over paged."""
        return self.reserved_bytes / self.paged_bytes

    @property
    def reserved_waste(self) -> float:
        return 1 - self.live_bytes / self.reserved_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefix:
    """The blocks of a prefix that many sessions share."""

    prefix: int
    sessions: int
    shared_blocks: int
    separate_blocks: int

    @property
    def saved_blocks(self) -> int:
        return self.separate_blocks - self.shared_blocks


def kv_shape(path: Path) -> KVShape:
    """The shape from the checkpoint in a directory, for any architecture; reads no weights. Raises ModelLoadError."""
    file = path / "config.json"
    name = Path(typed_name(file))
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise ValueError("it is too large for one")
        plain = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{name}: {error}") from None
    if not isinstance(plain, dict):
        raise ModelLoadError(f"{name}: not an object")
    inner = plain.get("text_config")
    return _shape({**plain, **inner} if isinstance(inner, dict) else plain, name)


def _shape(plain: Mapping[str, Any], file: Path) -> KVShape:
    layers = _number(plain, _LAYERS, file)
    heads = _number(plain, _HEADS, file)
    kv_heads = _number(plain, _KV_HEADS, file, 1 if plain.get("multi_query") is True else heads)
    head_dim = _number(plain, ("head_dim",), file, 0) or _number(plain, _WIDTH, file) // heads
    lora = _number(plain, ("kv_lora_rank",), file, 0)
    name = str(plain.get("dtype") or plain.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _BYTES:
        raise ModelLoadError(f"{file}: dtype={name!r} is unknown; known are {', '.join(_BYTES)}")
    return KVShape(
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        bytes_per_value=_BYTES[name],
        values_per_token=lora + _number(plain, ("qk_rope_head_dim",), file, 0) if lora else 0,
        max_len=_number(plain, _LENGTH, file, 0),
        windows=_windows(plain, layers),
        own_heads=_own_heads(plain, KVHeads(kv_heads, head_dim), layers, file),
    )


def _own_heads(plain: Mapping[str, Any], usual: KVHeads, layers: int, file: Path) -> dict[int, KVHeads]:
    """The heads of the layers that have their own: listed by layer, or those of layers without a window (Gemma 4)."""
    listed = plain.get("per_layer_config")
    if isinstance(listed, dict):
        own = {int(layer): values for layer, values in listed.items() if layer.isdecimal() and isinstance(values, dict)}
        return {
            layer: KVHeads(
                _number(values, ("num_key_value_heads",), file, usual.number),
                _number(values, ("head_dim",), file, usual.width),
            )
            for layer, values in own.items()
            if layer < layers
        }
    width = _number(plain, ("global_head_dim",), file, 0)
    if not width:
        return {}
    number = usual.number
    if plain.get("attention_k_eq_v") is True:
        number = _number(plain, ("num_global_key_value_heads",), file, usual.number)
    windows = _windows(plain, layers) or (None,) * layers
    return {layer: KVHeads(number, width) for layer, window in enumerate(windows) if window is None}


def _windows(plain: Mapping[str, Any], layers: int) -> tuple[Window, ...]:
    """The sliding window of each layer, by the types of the layers, or by the places of those without one."""
    window = plain.get("sliding_window")
    if (
        isinstance(window, bool)
        or not isinstance(window, int)
        or window < 1
        or plain.get("use_sliding_window") is False
    ):
        return ()
    types, first = plain.get("layer_types"), plain.get("max_window_layers", 0)
    if isinstance(types, list) and len(types) == layers:
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    each = plain.get("sliding_window_pattern") or plain.get("_sliding_window_pattern")
    if isinstance(each, int) and each > 0:
        return tuple(None if (layer + 1) % each == 0 else window for layer in range(layers))
    return tuple(window if not isinstance(first, int) or layer >= first else None for layer in range(layers))


def _number(plain: Mapping[str, Any], names: tuple[str, ...], file: Path, default: int | None = None) -> int:
    value = next((plain[name] for name in names if plain.get(name) is not None), default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0 or (default is None and value == 0):
        raise ModelLoadError(f"{file}: {' or '.join(names)} is {value!r}, must be a number")
    return value


def sequence_memory(shape: KVShape, *, tokens: int, max_len: int, block_size: int) -> SequenceMemory:
    """The memory of one sequence of `tokens` tokens.

    >>> shape = KVShape(layers=32, kv_heads=32, head_dim=128, bytes_per_value=2)
    >>> found = sequence_memory(shape, tokens=500, max_len=4096, block_size=16)
    >>> found.blocks, found.slack, found.paged_bytes, found.live_bytes, found.reserved_bytes
    (32, 12, 268435456, 262144000, 2147483648)
    """
    blocks = shape.blocks_for(tokens, block_size)
    seen = [min(tokens, window or tokens) for window in shape.layout.windows]
    return SequenceMemory(
        tokens=tokens,
        max_len=max_len,
        blocks=blocks,
        slack=blocks * block_size - sum(seen),
        live_bytes=shape.seen_bytes(tokens),
        paged_bytes=blocks * shape.bytes_per_block(block_size),
        reserved_bytes=max_len * shape.bytes_per_token,
    )


def shared_prefix(*, prefix: int, sessions: int, block_size: int) -> SharedPrefix:
    """Sessions with a common prefix, whose half-filled last block is shared until a session writes to it.

    >>> found = shared_prefix(prefix=200, sessions=16, block_size=16)
    >>> found.shared_blocks, found.separate_blocks, found.saved_blocks
    (13, 208, 195)
    """
    blocks = -(-prefix // block_size)
    return SharedPrefix(prefix=prefix, sessions=sessions, shared_blocks=blocks, separate_blocks=sessions * blocks)
