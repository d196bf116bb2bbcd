"""A checkpoint's config.json, read into the numbers the decoder needs.

Every option that would change the model's output is either represented here or refused by name. Code that a
checkpoint brings along (`auto_map`) is never looked at.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from quire_engine.contract.config import HEADLESS, entry_of
from quire_engine.contract.kv_groups import KVHeads
from quire_engine.execution.models.experts_config import ExpertsConfig, experts_of
from quire_engine.execution.models.families import FAMILIES, Bias, Family
from quire_engine.execution.models.options import Options
from quire_engine.execution.models.quantisation import Quantisation, quantisation_of
from quire_engine.plain_files import read_plain
from quire_kernels.activations import Activation

# Options of other families, at the values that change nothing here. Exporters write them into every configuration.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "rotary_pct": (1, 1.0),
    "rope_interleaved": (False,),
    "no_rope_layers": ([],),
    "attention_sinks": (False, 0),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "logit_scale": (1, 1.0),
    "scale_emb": (1, 1.0),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "use_mrope": (False,),
    "alibi": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (),
    "is_decoder": (False, True),
    "num_local_experts": (0,),
    "num_experts": (0,),
    "use_bidirectional_attention": (False,),
    "attention_bias": (False, True),  # of families whose reference does not read it
    "mlp_bias": (False, True),
    "full_attn_mod": (1,),
    "interpolate_factor": (1, 1.0),
    "lm_head_bias": (False,),
}
# Keys that say nothing about the arithmetic of a forward pass: of the files, of training, of generation, of the
# classes that wrote them. Any other key that no family reads is refused by name.
_HARMLESS = frozenset(
    [
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_attn_implementation_internal",
        "_commit_hash",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "aux_loss_alpha",
        "auto_map",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "classifier_dropout",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "dtype",
        "early_stopping",
        "embd_pdrop",
        "encoder_no_repeat_ngram_size",
        "eos_token_id",
        "ep_size",
        "experiments_config",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "generation_config",
        "hidden_dropout",
        "hidden_dropout_prob",
        "hidden_size_key",
        "id2label",
        "initializer_range",
        "label2id",
        "length_penalty",
        "load_balance_coeff",
        "max_length",
        "max_new_tokens",
        "max_sequence_length",
        "max_tokens",
        "max_window_layers",
        "min_length",
        "model_name",
        "model_type",
        "moe_capacity",
        "multi_token_pred_lambda",
        "name_or_path",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_labels",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "output_scores",
        "pad_token_id",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "pruned_heads",
        "remove_invalid_values",
        "repetition_penalty",
        "resid_pdrop",
        "residual_dropout",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "seq_aux",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "typical_p",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
        "use_grouped_mm",
    ]
)
_ROPE_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
    "yarn": frozenset({"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
    "longrope": frozenset({"factor", "attention_factor", "short_factor", "long_factor"}),
    "proportional": frozenset({"factor"}),
}
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# Of models that see too: what their other parts are made of, and the tokens that stand for images.
_OF_OTHER_PARTS = re.compile(
    "(vision|image|images|video|mm|boi|eoi|boa|eoa|audio|multimodal|projector|spatial|downsample|deepstack)_.*"
)
_PATTERNS = (
    "_sliding_window_pattern",
    "sliding_window_pattern",
    "global_attn_every_n_layers",
)  # each nth layer is without a window
_MOST_SHOWN = 60  # characters of a value in a message
_MAX_LAYERS = 4096  # beyond any model; what follows takes time and memory in proportion
_DTYPES = ("bfloat16", "float16", "float32")
RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A dense decoder-only transformer, or such a one that sees both ways."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    kv_heads: tuple[KVHeads, ...]  # of each layer
    norm_eps: float
    max_position_embeddings: int
    ropes: tuple[RopeConfig | None, ...]  # per layer; None: positions do not count
    tie_word_embeddings: bool
    qk_norm: bool  # of heads, or of all of a row's together, as the family has it
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]  # per layer, to each side that a row sees; None: the whole context
    bidirectional: bool = False  # rows see what is behind them: whole prompts in one step, and no text
    dtype: str  # "bfloat16", "float16" or "float32": what the checkpoint was saved as
    family: Family
    rotary_share: float  # of a head's values, those that are rotated
    activation: Activation = "silu"
    attention_scale: float  # of queries with keys
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    logit_factor: float = 1.0
    logit_cap: float | None = None
    score_cap: float | None = None  # of attention's scores
    experts: ExpertsConfig | None = None
    more_layers: int = 0  # in the checkpoint, which guess further tokens and are left out
    quantisation: Quantisation | None = None  # of the stored matrices; None: they are stored as numbers
    headless: bool = False  # a classifier or a model of embeddings: its last projection is not used, be it there or not
    full_keys_are_values: bool = False  # in layers without a window: they have no projection of values

    @property
    def num_kv_heads(self) -> int:
        """The number of KV heads in the layer that has most."""
        return max(heads.number for heads in self.kv_heads)

    @property
    def head_dim(self) -> int:
        """The width of a head in the layer with the widest ones."""
        return max(heads.width for heads in self.kv_heads)

    def rotary_dim(self, width: int) -> int:
        """How many of a head's values are rotated."""
        return int(width * self.rotary_share)

    def keys_are_values(self, layer: int) -> bool:
        """Whether the layer's values are its keys, before they are normed and rotated."""
        return self.full_keys_are_values and self.windows[layer] is None

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts, in place of an MLP or beside it."""
        return self.experts is not None and self.experts.layers[layer]

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has an MLP of its own."""
        return self.experts is None or not self.experts.layers[layer] or self.experts.entry.beside_mlp is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. `original_max_positions` is the length the frequencies were trained for."""

    rope_type: RopeType
    theta: float
    factor: float = 1.0
    share: float = 1.0  # proportional: of a head's angles, those that are not zero
    original_max_positions: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float | None = None  # yarn; None: derived from the factor
    mscale: float = 0.0  # yarn; 0: absent
    mscale_all_dim: float = 0.0  # yarn; 0: absent
    short_factors: tuple[float, ...] = ()  # longrope, of each frequency
    long_factors: tuple[float, ...] = ()


def load_model_config(path: Path, ignored: Collection[str] = ()) -> ModelConfig:
    """Read `path/config.json`, without the keys to be ignored.

    Raises NotNative naming the file and what no family computes, ModelLoadError naming what is wrong.
    """
    options = Options.read(path / "config.json", ignored)
    family, headless = _family(options)
    text = options if family.text_type is None else _text_of(options, family.text_type)
    config = _model_config(text, family, headless=headless or _makes_vectors(path))
    config = replace(config, quantisation=quantisation_of(options))
    unknown = [*_unknown(options, family), *(_unknown(text, family) if text is not options else ())]
    if unknown:
        verb = "is" if len(unknown) == 1 else "are"
        raise options.beyond(f"{', '.join(unknown)} {verb} not supported for {config.architecture}")
    return config


def _unknown(options: Options, family: Family) -> Iterator[str]:
    """The keys that are neither read nor harmless, with their values."""
    for key in sorted(options.unread() - _HARMLESS):
        value = options.raw(key)
        if options.given(key) and value not in _NEUTRAL.get(key, ()) and (key, value) not in family.restated:
            yield f"{key}={textwrap.shorten(repr(options.raw(key)), _MOST_SHOWN)}"


def _model_config(options: Options, family: Family, *, headless: bool) -> ModelConfig:
    num_layers = options.integer("num_hidden_layers", most=_MAX_LAYERS)
    num_heads = options.integer("num_attention_heads", family.default_heads)
    hidden_size = options.integer("hidden_size")
    max_positions = options.integer("max_position_embeddings", family.default_max_positions)
    bidirectional, windows = _view(options, family, num_layers)
    kv_heads = _kv_heads(options, family, windows, num_heads, hidden_size // num_heads)
    ropes, rotary_share = _ropes(options, family, windows, max_positions)
    for heads in dict.fromkeys(kv_heads):
        _check_heads(options, num_heads, heads)
        rotated = int(heads.width * rotary_share)
        if rotated % 2:
            raise options.beyond(
                f"{rotated} rotated values of {heads.width} in a head are not supported: they come in pairs"
            )
        _check_factors(options, ropes, rotated // 2)
    scales = family.scales
    return ModelConfig(
        architecture=family.architecture,
        vocab_size=options.integer("vocab_size", family.default_vocab_size),
        hidden_size=hidden_size,
        intermediate_size=options.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        kv_heads=kv_heads,
        norm_eps=options.number(family.eps_key, family.default_eps),
        max_position_embeddings=max_positions,
        ropes=ropes,
        tie_word_embeddings=options.boolean("tie_word_embeddings", family.ties_embeddings) or headless,
        qk_norm=_qk_norm(options, family),
        qkv_bias=_bias(options, family.qkv_bias, family.default_bias),
        o_bias=_bias(options, family.o_bias, family.default_bias),
        mlp_bias=_bias(options, family.mlp_bias, family.default_bias),
        windows=windows,
        bidirectional=bidirectional,
        dtype=_dtype(options),
        family=family,
        rotary_share=rotary_share,
        activation=_activation(options, family),
        attention_scale=_attention_scale(options, family, kv_heads[0].width),
        embedding_scale=_embedding_scale(options, family, hidden_size),
        residual_scale=_scale(options, scales.residual),
        logit_divisor=_scale(options, scales.logits),
        logit_factor=options.number(scales.logit_factor, 0.0625) if scales.logit_factor else 1.0,
        logit_cap=_cap(options, scales.logit_cap),
        score_cap=_cap(options, scales.score_cap),
        experts=experts_of(options, family.experts, num_layers) if family.experts else None,
        more_layers=options.integer(family.more_layers, 0, least=0) if family.more_layers else 0,
        headless=headless,
        full_keys_are_values=family.own_full_heads and options.boolean("attention_k_eq_v", False),
    )


def _kv_heads(
    options: Options, family: Family, windows: tuple[int | None, ...], num_heads: int, width: int
) -> tuple[KVHeads, ...]:
    """The heads of each layer's keys and values; `width` is theirs where nothing else is said."""
    usual = KVHeads(
        options.integer("num_key_value_heads", family.default_kv_heads or num_heads),
        options.integer("head_dim", family.default_head_dim or width),
    )
    if not family.own_full_heads:
        return (usual,) * len(windows)
    if windows[-1] is not None:
        raise options.beyond("a sliding window in the last layer is not supported")
    if size := options.integer("hidden_size_per_layer_input", 256, least=0):
        raise options.beyond(f"hidden_size_per_layer_input={size} is not supported")
    options.raw("vocab_size_per_layer_input")  # of the inputs that there are not
    options.boolean("attention_k_eq_v", False)
    wide = KVHeads(
        options.integer("num_global_key_value_heads", usual.number)
        if options.boolean("attention_k_eq_v", False)
        else usual.number,
        options.integer("global_head_dim", 512),
    )
    listed = options.section("per_layer_config")
    if not options.given("per_layer_config"):
        return tuple(wide if window is None else usual for window in windows)
    found = tuple(_listed_heads(listed.section(str(layer)), usual) for layer in range(len(windows)))
    if listed.unread():
        raise options.beyond(f"per_layer_config has more than layers: {', '.join(sorted(listed.unread()))}")
    return found


def _listed_heads(layer: Options, usual: KVHeads) -> KVHeads:
    """Return the KV heads of a layer whose own options are listed. Raises for other options."""
    heads = KVHeads(layer.integer("num_key_value_heads", usual.number), layer.integer("head_dim", usual.width))
    if layer.unread():
        raise layer.beyond(f"{', '.join(sorted(layer.unread()))} cannot be a layer's own")
    return heads


def _attention_scale(options: Options, family: Family, width: int) -> float:
    scales = family.scales
    if family.attention_scale is not None:
        return family.attention_scale
    if scales.attention:
        return _scale(options, scales.attention)
    inverse_root: float = (
        options.number(scales.attention_width, 256.0) if scales.attention_width else float(width)
    ) ** -0.5
    return inverse_root


def _activation(options: Options, family: Family) -> Activation:
    name = options.text(family.activation_key, family.default_activation)
    if family.experts is not None and family.experts.activation is not None:
        return family.experts.activation
    if name not in _ACTIVATIONS:
        raise options.beyond(f"{family.activation_key}={name!r} is not supported; only {', '.join(_ACTIVATIONS)} are")
    return _ACTIVATIONS[name]


def _check_heads(options: Options, num_heads: int, heads: KVHeads) -> None:
    if num_heads % heads.number:
        raise options.error(f"{num_heads} attention heads cannot share {heads.number} key-value heads")
    if heads.width % 2 or heads.width < 4:
        raise options.error(f"head_dim={heads.width} must be even and at least 4 for rotary embeddings")


def _check_factors(options: Options, ropes: tuple[RopeConfig | None, ...], count: int) -> None:
    for rope in ropes:
        factors = () if rope is None else (rope.short_factors, rope.long_factors)
        if any(each and len(each) != count for each in factors):
            raise options.error(f"short_factor and long_factor must have {count} numbers")


def _embedding_scale(options: Options, family: Family, width: int) -> float:
    by_width = family.embeds_by_width
    if by_width is True or (isinstance(by_width, str) and options.boolean(by_width, False)):
        return float(width**0.5)
    return _scale(options, family.scales.embedding)


def _scale(options: Options, key: str | None) -> float:
    return 1.0 if key is None else options.number(key, 1.0)


def _cap(options: Options, key: str | None) -> float | None:
    return options.number(key) if key is not None and options.given(key) else None


def _text_of(options: Options, wanted: str) -> Options:
    """The options of the text part. The head is the whole model's, so that its word on tied embeddings counts."""
    text = options.section("text_config")
    found = text.text("model_type", "")
    if found != wanted:
        raise options.beyond(f"text_config.model_type={found!r} is not supported; only {wanted} is")
    for key in ("tie_word_embeddings", "dtype", "torch_dtype"):
        if options.given(key):
            text.put(key, options.raw(key))
    options.pass_over(_OF_OTHER_PARTS)
    return text


def _family(options: Options) -> tuple[Family, bool]:
    """The family, and whether the architecture is the one without a head for tokens."""
    names = options.raw("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise options.error(f"architectures={names!r} must name exactly one architecture")
    name = entry_of(names[0])
    if name not in FAMILIES:
        known = ", ".join(get_close_matches(names[0], FAMILIES, n=4, cutoff=0.5) or list(FAMILIES)[:4])
        raise options.beyond(
            f"architecture {names[0]!r} is not supported; supported are {len(FAMILIES)}, such as {known}"
        )
    return FAMILIES[name], names[0].endswith(HEADLESS)


def _makes_vectors(path: Path) -> bool:
    """Whether the checkpoint is one of sentence-transformers that pools the last layer's rows."""
    file = path / "modules.json"
    try:
        modules = json.loads(read_plain(file))
    except (OSError, ValueError, RecursionError):
        return False
    kinds = [module.get("type") for module in modules if isinstance(module, dict)] if isinstance(modules, list) else []
    return any(isinstance(kind, str) and kind.endswith(".Pooling") for kind in kinds)


def _bias(options: Options, bias: Bias, default: bool) -> bool:
    # A family without the option must not be given one: its reference implementation would not read it either.
    return bias == "always" if bias in ("always", "never") else options.boolean(bias, default)


def _qk_norm(options: Options, family: Family) -> bool:
    return family.qk_norm is not None and (family.qk_norm_key is None or options.boolean(family.qk_norm_key, False))


def _dtype(options: Options) -> str:
    name = options.text("dtype", "") or options.text("torch_dtype", "") or "float32"
    name = name.removeprefix("torch.")
    if name not in _DTYPES:
        raise options.error(f"dtype={name!r} is not supported; supported: {', '.join(_DTYPES)}")
    return name


def _view(options: Options, family: Family, num_layers: int) -> tuple[bool, tuple[int | None, ...]]:
    """Whether rows see what is behind them too, and the window of each layer to each side that a row sees."""
    windows = _windows(options, family, num_layers)
    if not (family.may_see_behind and options.boolean("use_bidirectional_attention", False)):
        return False, windows
    # The option counts both sides together.
    return True, tuple(None if window is None else window // 2 + 1 for window in windows)


def _windows(options: Options, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer, in tokens."""
    if family.window == "never":
        return (None,) * num_layers
    window = family.default_window
    if options.has("sliding_window"):  # null is an answer too: no window
        window = (options.integer("sliding_window", least=0) or None) if options.given("sliding_window") else None
    if family.window == "all_layers":
        return (window,) * num_layers

    qwen = family.window in {"qwen", "qwen_moe"}
    if (qwen or options.has("use_sliding_window")) and not options.boolean("use_sliding_window", False):
        window = None
    layer_types = options.raw("layer_types")
    if layer_types is None:
        return _windows_by_place(options, family, window, num_layers)
    if qwen or family.window == "upper":
        options.raw("max_window_layers")  # says nothing where the types are listed
    else:
        for key in _PATTERNS:
            options.raw(key)
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise options.error(f"layer_types must list {num_layers} layers")
    for kind in layer_types:
        if kind not in ("full_attention", "sliding_attention"):
            raise options.beyond(f"layer type {kind!r} is not supported")
        if kind == "sliding_attention" and window is None:
            raise options.error(
                "layer_types asks for sliding_attention, but use_sliding_window or sliding_window is off"
            )
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _windows_by_place(options: Options, family: Family, window: int | None, num_layers: int) -> tuple[int | None, ...]:
    """Return each layer's window for a checkpoint that lists no types: upper layers have one, or all but each nth."""
    if family.window in {"qwen", "qwen_moe", "upper"}:
        bound = options.integer("max_window_layers", family.default_bound, least=0)
        if family.window == "qwen_moe":
            return tuple(window if layer < bound and layer % 2 == 0 else None for layer in range(num_layers))
        return tuple(window if layer >= bound else None for layer in range(num_layers))
    each = family.full_each
    if each is not None:
        for key in _PATTERNS:
            if isinstance(options.raw(key), str):
                raise options.beyond(f"{key}={options.raw(key)!r} without layer_types is not supported")
            each = options.integer(key, each)
    return tuple(None if each and (layer + 1) % each == 0 else window for layer in range(num_layers))


def _ropes(
    options: Options, family: Family, windows: tuple[int | None, ...], max_positions: int
) -> tuple[tuple[RopeConfig | None, ...], float]:
    """The rotation of each layer, and the share of a head that is rotated."""
    share = options.number("partial_rotary_factor", family.rotary_share)
    older, rope = options.section("rope_scaling"), options.section("rope_parameters")
    by_type = "full_attention" in rope.keys() | older.keys()
    if older.keys() and not by_type:
        rope = older
    if family.rotation != "own_table":
        found, share = _rope(options, rope, family, max_positions, family.default_theta, share)
        return _placed(options, family, windows, found), share
    # Only the table of layers without a window is stretched.
    local_theta = options.number("rope_local_base_freq", family.default_local_theta or family.default_theta)
    if by_type:
        full, local = rope.section("full_attention"), rope.section("sliding_attention")
    else:
        full, local = rope, Options({}, "rope")
    everywhere, share = _rope(options, full, family, max_positions, family.default_theta, share)
    if by_type:
        windowed, _ = _rope(options, local, family, max_positions, local_theta, share)
    else:
        windowed = RopeConfig(rope_type="default", theta=local_theta)
    return tuple(everywhere if window is None else windowed for window in windows), share


def _placed(
    options: Options, family: Family, windows: tuple[int | None, ...], rope: RopeConfig
) -> tuple[RopeConfig | None, ...]:
    """The layers that are rotated by the one table."""
    windowed = family.rotation == "windowed" and any(window is not None for window in windows)
    if windowed or family.rotation == "windowed_alone":
        return tuple(None if window is None else rope for window in windows)
    if family.rotation != "listed":
        return (rope,) * len(windows)
    listed = options.raw("no_rope_layers")
    each = options.integer("no_rope_layer_interval", 4)
    if listed is None:
        listed = [int((layer + 1) % each != 0) for layer in range(len(windows))]
    if not isinstance(listed, list) or len(listed) != len(windows) or any(each not in (0, 1) for each in listed):
        raise options.error(f"no_rope_layers must list {len(windows)} layers by 0 and 1")
    return tuple(rope if rotated else None for rotated in listed)


def _rope(  # noqa: PLR0917 - what rope depends on
    options: Options, rope: Options, family: Family, max_positions: int, default_theta: float, share: float
) -> tuple[RopeConfig, float]:
    """RoPE from `rope_scaling` (transformers 4) or `rope_parameters` (5), in which `rope_theta` may live too."""
    rope_type = rope.text("rope_type", "") or rope.text("type", "") or "default"
    if rope_type == "su":
        rope_type = "longrope"  # its first name
    if rope_type not in _ROPE_KEYS:
        raise options.beyond(f"rope type {rope_type!r} is not supported; supported: {', '.join(_ROPE_KEYS)}")
    share = rope.number("partial_rotary_factor", share)
    if share > 1:
        raise options.error(f"partial_rotary_factor={share} must be at most 1")
    common = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
    unknown = rope.keys() - common - family.ignored_rope_keys - _ROPE_KEYS[rope_type]
    # Other types' parameters at null are what some exporters write; anything else unknown would change the angles.
    unknown = {key for key in unknown if rope.raw(key) is not None}
    if unknown:
        raise options.beyond(f"rope parameters {', '.join(sorted(unknown))} are not supported with type {rope_type!r}")

    theta = rope.number("rope_theta", options.number("rope_theta", default_theta))
    if theta <= 1:
        raise options.error(f"rope_theta={theta} must be greater than 1")
    original = options.integer(
        "original_max_position_embeddings", rope.integer("original_max_position_embeddings", max_positions)
    )
    if rope_type == "default":
        return RopeConfig(rope_type="default", theta=theta), share
    if rope_type == "proportional":
        share = 1.0  # the angles beyond the share are zero, and keep their places in the head
    return _scaled_rope(rope, rope_type, theta, original, max_positions), share


def _scaled_rope(rope: Options, rope_type: str, theta: float, original: int, max_positions: int) -> RopeConfig:
    """RoPE whose angles are stretched beyond `original` positions, the length of the model's first training."""
    if rope_type == "proportional":
        share = rope.number("partial_rotary_factor", 1.0)
        return RopeConfig(rope_type="proportional", theta=theta, factor=rope.number("factor", 1.0), share=share)
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
    if rope_type == "longrope":
        factor = rope.number("factor", max_positions / original)
        amplitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        return RopeConfig(
            rope_type="longrope",
            theta=theta,
            original_max_positions=original,
            attention_factor=rope.number("attention_factor", amplitude),
            short_factors=rope.numbers("short_factor"),
            long_factors=rope.numbers("long_factor"),
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
