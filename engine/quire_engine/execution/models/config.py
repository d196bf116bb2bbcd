"""A checkpoint's config.json, read into the numbers the decoder needs.

Every option that would change the model's output is either represented here or refused by name. Code that a
checkpoint brings along (`auto_map`) is never looked at.
"""

from __future__ import annotations

import json
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quire_engine.errors import ModelLoadError, NotNative
from quire_engine.execution.models.families import FAMILIES, Bias, Family

_MAX_BYTES = 64 << 20  # a config is kilobytes and the largest shard index a few megabytes
# Options that change the arithmetic in ways this decoder does not compute, with the values that mean "off".
_REFUSED: dict[str, tuple[object, ...]] = {
    "quantization_config": (None,),
    "compression_config": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "rotary_pct": (None, 1, 1.0),
    "rope_interleaved": (None, False),
    "no_rope_layers": (None, []),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logits_soft_cap": (None,),
    "attention_sinks": (None, False, 0),
    "attention_chunk_size": (None,),
    "query_pre_attn_scalar": (None,),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "logit_scale": (None, 1, 1.0),
    "scale_emb": (None, 1, 1.0),
    "use_qk_norm": (None, False),
    "qk_layernorm": (None, False),
    "use_mrope": (None, False),
    "alibi": (None, False),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "num_local_experts": (None, 0),
    "num_experts": (None, 0),
}
_ROPE_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
    "yarn": frozenset({"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
}
_MAX_LAYERS = 4096  # beyond any model; what follows takes time and memory in proportion
_DTYPES = ("bfloat16", "float16", "float32")
RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A dense decoder-only transformer."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]  # per layer; None: the whole context
    dtype: str  # "bfloat16", "float16" or "float32": what the checkpoint was saved as


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. `original_max_positions` is the length the frequencies were trained for."""

    rope_type: RopeType
    theta: float
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float | None = None  # yarn; None: derived from the factor
    mscale: float = 0.0  # yarn; 0: absent
    mscale_all_dim: float = 0.0  # yarn; 0: absent


def load_model_config(path: Path) -> ModelConfig:
    """Read `path/config.json`. Raises ModelLoadError naming the file and what is wrong or unsupported."""
    options = Options.read(path / "config.json")
    family = _family(options)
    for key, neutral in _REFUSED.items():
        if options.raw(key) not in neutral:
            raise options.not_native(f"{key}={options.raw(key)!r} is not supported")
    if options.text("hidden_act", "silu") not in ("silu", "swish"):
        raise options.not_native(f"hidden_act={options.text('hidden_act', 'silu')!r} is not supported; only silu is")

    num_layers = options.integer("num_hidden_layers", most=_MAX_LAYERS)
    num_heads = options.integer("num_attention_heads")
    hidden_size = options.integer("hidden_size")
    num_kv_heads = options.integer("num_key_value_heads", family.default_kv_heads or num_heads)
    head_dim = options.integer("head_dim", family.default_head_dim or hidden_size // num_heads)
    max_positions = options.integer("max_position_embeddings", family.default_max_positions)
    if num_heads % num_kv_heads:
        raise options.error(f"{num_heads} attention heads cannot share {num_kv_heads} key-value heads")
    if head_dim % 2 or head_dim < 4:
        raise options.error(f"head_dim={head_dim} must be even and at least 4 for rotary embeddings")
    return ModelConfig(
        architecture=family.architecture,
        vocab_size=options.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=options.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=options.number("rms_norm_eps", 1e-6),
        max_position_embeddings=max_positions,
        rope=_rope(options, max_positions),
        tie_word_embeddings=options.boolean("tie_word_embeddings", False),
        qkv_bias=_bias(options, family.qkv_bias),
        o_bias=_bias(options, family.o_bias),
        mlp_bias=_bias(options, family.mlp_bias),
        qk_norm=family.qk_norm,
        windows=_windows(options, family, num_layers),
        dtype=_dtype(options),
    )


def _family(options: Options) -> Family:
    names = options.raw("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise options.error(f"architectures={names!r} must name exactly one architecture")
    if names[0] not in FAMILIES:
        raise options.not_native(f"architecture {names[0]!r} is not supported; supported: {', '.join(FAMILIES)}")
    return FAMILIES[names[0]]


def _bias(options: Options, bias: Bias) -> bool:
    if bias in ("attention_bias", "mlp_bias"):
        return options.boolean(bias, False)
    # A family without the option must not be given one: its reference implementation would not read it either.
    return bias == "always"


def _dtype(options: Options) -> str:
    name = options.text("dtype", "") or options.text("torch_dtype", "") or "float32"
    name = name.removeprefix("torch.")
    if name not in _DTYPES:
        raise options.error(f"dtype={name!r} is not supported; supported: {', '.join(_DTYPES)}")
    return name


def _windows(options: Options, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer, in tokens."""
    if family.window == "never":
        if options.raw("sliding_window") is not None:
            raise options.not_native(f"sliding_window is not supported for {family.architecture}")
        return (None,) * num_layers
    window = family.default_window
    if options.has("sliding_window"):  # null is an answer too: no window
        window = options.integer("sliding_window") if options.given("sliding_window") else None
    if family.window == "all_layers":
        if options.raw("layer_types") is not None:
            raise options.not_native(f"layer_types is not supported for {family.architecture}")
        return (window,) * num_layers

    if not options.boolean("use_sliding_window", False):
        window = None
    layer_types = options.raw("layer_types")
    if layer_types is None:
        first = options.integer("max_window_layers", 28, least=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise options.error(f"layer_types must list {num_layers} layers")
    for kind in layer_types:
        if kind not in ("full_attention", "sliding_attention"):
            raise options.not_native(f"layer type {kind!r} is not supported")
        if kind == "sliding_attention" and window is None:
            raise options.error(
                "layer_types asks for sliding_attention, but use_sliding_window or sliding_window is off"
            )
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _rope(options: Options, max_positions: int) -> RopeConfig:
    """RoPE from `rope_scaling` (transformers 4) or `rope_parameters` (5), in which `rope_theta` may live too."""
    rope = options.section("rope_scaling")
    if not rope.keys():
        rope = options.section("rope_parameters")
    rope_type = rope.text("rope_type", "") or rope.text("type", "") or "default"
    if rope_type not in _ROPE_KEYS:
        raise options.not_native(f"rope type {rope_type!r} is not supported; supported: {', '.join(_ROPE_KEYS)}")
    if rope.raw("partial_rotary_factor") not in (None, 1, 1.0):
        raise options.not_native(f"partial_rotary_factor={rope.raw('partial_rotary_factor')!r} is not supported")
    common = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
    unknown = rope.keys() - common - _ROPE_KEYS[rope_type]
    # Other types' parameters at null are what some exporters write; anything else unknown would change the angles.
    unknown = {key for key in unknown if rope.raw(key) is not None}
    if unknown:
        raise options.not_native(
            f"rope parameters {', '.join(sorted(unknown))} are not supported with type {rope_type!r}"
        )

    theta = rope.number("rope_theta", options.number("rope_theta", 10000.0))
    if theta <= 1:
        raise options.error(f"rope_theta={theta} must be greater than 1")
    original = options.integer(
        "original_max_position_embeddings", rope.integer("original_max_position_embeddings", max_positions)
    )
    if rope_type == "default":
        return RopeConfig(rope_type="default", theta=theta)
    return _scaled_rope(rope, rope_type, theta, original, max_positions)


def _scaled_rope(rope: Options, rope_type: str, theta: float, original: int, max_positions: int) -> RopeConfig:
    """RoPE whose angles are stretched beyond `original` positions, the length of the model's first training."""
    if rope_type == "linear":
        return RopeConfig(rope_type="linear", theta=theta, factor=rope.number("factor"))
    if rope_type == "dynamic":
        # The reference scales from max_position_embeddings, whatever the original length was.
        return RopeConfig(
            rope_type="dynamic", theta=theta, factor=rope.number("factor"), original_max_positions=max_positions
        )
    if rope_type == "llama3":
        if rope.number("high_freq_factor") <= rope.number("low_freq_factor"):
            raise rope.error("high_freq_factor must be greater than low_freq_factor")
        return RopeConfig(
            rope_type="llama3",
            theta=theta,
            factor=rope.number("factor"),
            original_max_positions=original,
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
    return RopeConfig(
        rope_type="yarn",
        theta=theta,
        factor=rope.number("factor", max_positions / original),
        original_max_positions=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.boolean("truncate", True),
        attention_factor=rope.number("attention_factor") if rope.given("attention_factor") else None,
        mscale=rope.number("mscale", 0.0, zero=True),
        mscale_all_dim=rope.number("mscale_all_dim", 0.0, zero=True),
    )


class Options:
    """Typed access to one JSON object. A default stands in for a key that is absent or null.

    A value of the wrong type or out of range is a ModelLoadError that names the file, the key and the value.
    """

    def __init__(self, values: dict[str, object], where: str) -> None:
        self._values = values
        self._where = where

    @classmethod
    def read(cls, file: Path) -> Options:
        return cls(read_json_object(file), str(file))

    def error(self, reason: str) -> ModelLoadError:
        return ModelLoadError(f"{self._where}: {reason}")

    def not_native(self, reason: str) -> NotNative:
        return NotNative(f"{self._where}: {reason}")

    def keys(self) -> set[str]:
        return set(self._values)

    def has(self, key: str) -> bool:
        """Whether the key is there, be it null."""
        return key in self._values

    def given(self, key: str) -> bool:
        """Whether the key has a value other than null."""
        return self._values.get(key) is not None

    def raw(self, key: str) -> object:
        return self._values.get(key)

    def section(self, key: str) -> Options:
        """A nested object; empty if absent or null."""
        value = self._values.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.error(f"{key} must be an object, not {value!r}")
        return Options(value, f"{self._where}: {key}")

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = (1 << 31) - 1) -> int:
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.error(f"{key} must be an integer from {least} to {most}, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None, *, zero: bool = False) -> float:
        """A positive number; with `zero`, 0 as well."""
        value = self._present(key, default)
        # Compared before any conversion: JSON integers can be too large for a float.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e30:
            raise self.error(f"{key} must be a positive number, not {value!r}")
        if value == 0 and not zero:
            raise self.error(f"{key} must be greater than 0")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._present(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, not {value!r}")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._present(key, default)
        if not isinstance(value, str):
            raise self.error(f"{key} must be a string, not {value!r}")
        return value

    def _present(self, key: str, default: object) -> object:
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"{key} is missing")
        return value


def read_json_object(file: Path) -> dict[str, object]:
    """The object in a JSON file. Raises ModelLoadError if it is missing, too large, or not an object."""
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe would wait for its writer
            raise ModelLoadError(f"{file}: not a plain file")
        if status.st_size > _MAX_BYTES:
            raise ModelLoadError(f"{file}: larger than {_MAX_BYTES >> 20} MiB")
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise ModelLoadError(f"{file}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{file}: must hold a JSON object")
    return value
