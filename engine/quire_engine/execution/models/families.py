"""The differences between supported architectures, as data and not as code paths.

Promises: one `Family` per architecture; the decoder itself is the same for all. Must not know: torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

# Where a bias comes from: the family always has it, never has it, or the named option of the checkpoint says so.
Bias = Literal["always", "never"] | str
# Which layers see a sliding window: none, all of them, those that the Qwen options name (of its mixtures of experts the
# even ones below a bound, of others those above), those above the bound alone, or those of `layer_types`, else all but
# each nth.
Window = Literal["never", "all_layers", "qwen", "qwen_moe", "upper", "by_type"]
# Which layers are rotated: all by one table; windowed ones by a table of their own; windowed ones alone, or all where
# there are none; windowed ones alone in any case; or those that `no_rope_layers` does not leave out.
Rotation = Literal["all", "own_table", "windowed", "windowed_alone", "listed"]
# Where a head's rotated pairs lie: in its halves, or side by side.
Pairs = Literal["halves", "neighbours"]
# How a norm's weight multiplies: after a rounding, in float32, in float32 as 1 + weight, or in float32 what is centred.
NormForm = Literal["rounded", "wide", "offset", "centred"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """The names of a layer's norms; None: there is none at that place."""

    attention: str | None = "input_layernorm"
    after_attention: str | None = None
    mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """The options that scale a model's numbers."""

    embedding: str | None = None
    residual: str | None = None
    attention: str | None = None  # the scale itself
    attention_width: str | None = None  # its inverse square
    logits: str | None = None  # which divides them
    logit_factor: str | None = None  # which multiplies them
    logit_cap: str | None = None  # of a tanh
    score_cap: str | None = None  # of attention's scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Experts in place of a layer's MLP: the options that describe them, and their defaults."""

    switch: str | None = None  # the option without which there are none; None: there always are
    inner: str = "intermediate_size"
    default_inner: int | None = None
    count: str | None = None  # None: num_local_experts, or num_experts
    default_count: int | None = None
    top_k: str = "num_experts_per_tok"
    default_top_k: int | None = None
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    selection_bias: bool = False  # that is added to scores for the choice alone
    groups: bool = False  # options tell of how many groups of experts the best are kept
    normalised: str | None = None  # the option that has a row's weights divided by their sum; None: they always are
    default_normalised: bool = False
    epsilon: float = 0.0  # which is added to the sum
    least_sum: str | None = None  # the option of the least sum that divides
    scale: str | None = None  # the option that multiplies the weights
    # Which layers have experts: all; by decoder_sparse_step and mlp_only_layers; those from `first` on;
    # or those from moe_layer_start_index to moe_layer_end_index, each by moe_layer_interval.
    layers: Literal["all", "steps", "behind", "between"] = "all"
    first: str = "first_k_dense_replace"  # of "behind"
    default_first: int = 0
    shared: str | None = None  # the name of an MLP that every row has beside its experts
    shared_inner: str | None = None  # the option of its width
    shared_count: str | None = None  # or the one that says how many experts wide it is
    default_shared: int | None = None
    shared_gate: str | None = None  # the name of the matrix of one row whose sigmoid multiplies it
    # Experts beside the layer's MLP, both of which read x: the norms of what the MLP gives, before the experts, and of
    # what they give.
    beside_mlp: tuple[str, str, str] | None = None
    wide_router: bool = False  # the router's weights are float32 in models of 16 bits too
    own_norm: bool = False  # the router norms x by a weight of its own, and every expert has a scale
    biases: bool = False  # of the router, and of every expert
    activation: Literal["swiglu_clamped"] | None = None  # None: the option's
    # How a tensor of all of them is stored: each expert's matrices as they multiply, the gate's rows before up's;
    # transposed; or transposed with columns of both in turns.
    stored: Literal["rows", "columns", "turned"] = "rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """An architecture: its biases, norms and windows, and the defaults of options that checkpoints may omit."""

    architecture: str
    qkv_bias: Bias = "never"
    default_bias: bool = False  # where an option that is to say so does not
    o_bias: Bias = "never"
    mlp_bias: Bias = "never"
    qk_norm: Literal["head", "row"] | None = None
    qk_norm_key: str | None = None  # the option without which there is none; None: there always is
    norms: Norms = Norms()
    norm_form: NormForm = "rounded"
    parallel: bool = False  # attention and MLP read the same normed rows, and both are added
    eps_key: str = "rms_norm_eps"
    activation_key: str = "hidden_act"
    default_activation: str = "silu"
    scales: Scales = Scales()
    embeds_by_width: bool | str = False  # embeddings are multiplied by the root of their width, or an option says so
    window: Window = "never"
    default_window: int | None = None
    default_bound: int = 28  # of layers with a window, where max_window_layers does not say
    full_each: int | None = None  # by_type without types: each nth layer has no window; None: all have it
    rotation: Rotation = "all"
    pairs: Pairs = "halves"
    default_theta: float = 10000.0
    default_local_theta: float | None = None  # of windowed layers; None: as the others
    rotary_share: float = 1.0  # of a head, where the checkpoint does not say
    fused: frozenset[str] = frozenset()  # which of qkv and gate_up is stored as one matrix
    default_vocab_size: int | None = None  # None: the checkpoint has to say
    default_heads: int | None = None
    default_kv_heads: int | None = None  # None: as many as query heads
    default_head_dim: int | None = None  # None: hidden_size / num_attention_heads
    default_max_positions: int = 2048
    default_eps: float = 1e-6
    ties_embeddings: bool = False
    ignored_rope_keys: frozenset[str] = frozenset()  # that say nothing about texts
    restated: tuple[tuple[str, object], ...] = ()  # options, at the values that say what the entry has anyway
    prefixes: tuple[str, ...] = ("model.",)  # of its tensors; the first that the checkpoint has
    attention_scale: float | None = None  # of queries with keys; None: an option's, or the inverse root of the width
    own_full_heads: bool = False  # layers without a window have heads of their own, and may use keys as values
    v_norm: bool = False  # value heads are normed, without a weight
    layer_scalar: bool = False  # a number by which a layer's result is multiplied
    sinks: bool = False  # every query head has a score without a key
    attention_gate: str | None = None  # the matrix of x whose sigmoid multiplies what attention gives
    experts: Experts | None = None
    more_layers: str | None = None  # the option that counts layers that guess further tokens, which are left out
    may_see_behind: bool = False  # where `use_bidirectional_attention` is true
    text_type: str | None = None  # of a model that sees too: model_type of its text_config, in which the options lie


_LLAMA = Family(
    architecture="LlamaForCausalLM", qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"
)
_MISTRAL = Family(
    architecture="MistralForCausalLM",
    window="all_layers",
    default_kv_heads=8,
    default_max_positions=131072,
    default_window=4096,
)
_QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm="head",
    window="qwen",
    default_kv_heads=32,
    default_head_dim=128,
    default_max_positions=32768,
    default_window=4096,
)
_SANDWICH = Norms(
    after_attention="post_attention_layernorm", mlp="pre_feedforward_layernorm", after_mlp="post_feedforward_layernorm"
)
_BEHIND = Norms(
    attention=None, after_attention="post_attention_layernorm", mlp=None, after_mlp="post_feedforward_layernorm"
)
_GEMMA3 = Family(
    architecture="Gemma3ForCausalLM",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm="head",
    norms=_SANDWICH,
    norm_form="offset",
    activation_key="hidden_activation",
    default_activation="gelu_pytorch_tanh",
    scales=Scales(attention_width="query_pre_attn_scalar", logit_cap="final_logit_softcapping"),
    embeds_by_width=True,
    window="by_type",
    default_window=4096,
    full_each=6,
    rotation="own_table",
    default_theta=1e6,
    default_local_theta=1e4,
    default_vocab_size=262208,
    default_heads=8,
    default_kv_heads=4,
    default_head_dim=256,
    default_max_positions=131072,
    ties_embeddings=True,
)
_GEMMA2 = replace(
    _GEMMA3,
    architecture="Gemma2ForCausalLM",
    qk_norm=None,
    scales=replace(_GEMMA3.scales, score_cap="attn_logit_softcapping"),
    full_each=2,
    rotation="all",
    default_theta=1e4,
    default_local_theta=None,
    default_vocab_size=256000,
    default_max_positions=8192,
)
_GEMMA4 = replace(
    _GEMMA3,
    architecture="Gemma4ForCausalLM",
    norm_form="wide",
    scales=Scales(logit_cap="final_logit_softcapping"),
    attention_scale=1.0,
    own_full_heads=True,
    v_norm=True,
    layer_scalar=True,
    default_window=512,
    default_vocab_size=262144,
    experts=Experts(
        switch="enable_moe_block",
        inner="moe_intermediate_size",
        count="num_experts",
        top_k="top_k_experts",
        beside_mlp=("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"),
        own_norm=True,
    ),
    # Of models with more parts than these, which have layers of other kinds; and of tokens of images.
    restated=(
        ("num_kv_shared_layers", 0),
        ("use_double_wide_mlp", False),
        ("use_bidirectional_attention", "vision"),
    ),
)
_GLM4 = Family(
    architecture="Glm4ForCausalLM",
    qkv_bias="attention_bias",
    norms=Norms(
        after_attention="post_self_attn_layernorm", mlp="post_attention_layernorm", after_mlp="post_mlp_layernorm"
    ),
    pairs="neighbours",
    rotary_share=0.5,
    fused=frozenset({"gate_up"}),
    default_kv_heads=2,
    default_head_dim=128,
    default_max_positions=131072,
    default_eps=1.5625e-7,
)
_OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm="row",
    norms=_BEHIND,
    norm_form="wide",
    default_eps=1e-5,
)
_COHERE = Family(
    architecture="CohereForCausalLM",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    norms=Norms(mlp=None),
    norm_form="centred",
    parallel=True,
    eps_key="layer_norm_eps",
    scales=Scales(logit_factor="logit_scale"),
    pairs="neighbours",
    default_theta=5e5,
    default_heads=64,
    default_vocab_size=256000,
    default_max_positions=8192,
    default_eps=1e-5,
    ties_embeddings=True,
    restated=(
        ("layer_switch", 4),
        ("order_of_interleaved_layers", "local_attn_first"),
        ("position_embedding_type", "rope_gptj"),
        ("use_embedding_sharing", True),
        ("use_gated_activation", True),
        ("use_parallel_block", True),
        ("use_parallel_embedding", False),
    ),
)
_QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm="head",
    default_kv_heads=4,
    default_max_positions=32768,
    experts=Experts(
        inner="moe_intermediate_size",
        default_inner=768,
        default_count=128,
        default_top_k=8,
        normalised="norm_topk_prob",
        layers="steps",
    ),
    restated=(("use_sliding_window", False),),
)
# Of DeepSeek-V3 (arXiv:2412.19437) and what routes as it does.
_BY_SIGMOID = Experts(
    inner="moe_intermediate_size",
    default_inner=1408,
    count="n_routed_experts",
    scoring="sigmoid",
    selection_bias=True,
    groups=True,
    normalised="norm_topk_prob",
    epsilon=1e-20,
    scale="routed_scaling_factor",
    layers="behind",
    shared="shared_experts",
    shared_count="n_shared_experts",
)
_ROUTED_SO = (
    ("moe_layer_freq", 1),
    ("scoring_func", "sigmoid"),
    ("scoring_func", "noaux_tc"),
    ("topk_method", "noaux_tc"),
)
_OF_WRAPPERS = ("model.language_model.", "language_model.model.")

_FAMILIES = (
    _LLAMA,
    _MISTRAL,
    Family(
        architecture="Qwen2ForCausalLM",
        qkv_bias="always",
        window="qwen",
        default_kv_heads=32,
        default_max_positions=32768,
        default_window=4096,
    ),
    _QWEN3,
    _GEMMA2,
    _GEMMA3,
    replace(_GEMMA3, architecture="Gemma3ForConditionalGeneration", prefixes=_OF_WRAPPERS, text_type="gemma3_text"),
    replace(_GEMMA3, architecture="Gemma3TextModel", may_see_behind=True),
    _GEMMA4,
    replace(_GEMMA4, architecture="Gemma4ForConditionalGeneration", prefixes=_OF_WRAPPERS, text_type="gemma4_text"),
    replace(_MISTRAL, architecture="Mistral3ForConditionalGeneration", prefixes=_OF_WRAPPERS, text_type="mistral"),
    replace(
        _QWEN3,
        architecture="Qwen3VLForConditionalGeneration",
        prefixes=_OF_WRAPPERS,
        text_type="qwen3_vl_text",
        window="never",
        default_theta=5e6,
        default_max_positions=128000,
        # The three axes of a position are equal where there are only texts.
        ignored_rope_keys=frozenset({"mrope_section", "mrope_interleaved"}),
    ),
    Family(
        architecture="MinistralForCausalLM",
        window="by_type",
        default_kv_heads=8,
        default_max_positions=131072,
        default_window=4096,
    ),
    Family(
        architecture="Phi3ForCausalLM",
        window="all_layers",
        fused=frozenset({"qkv", "gate_up"}),
        default_max_positions=4096,
        default_eps=1e-5,
    ),
    Family(
        architecture="GraniteForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        scales=Scales(
            embedding="embedding_multiplier",
            residual="residual_multiplier",
            attention="attention_multiplier",
            logits="logits_scaling",
        ),
    ),
    Family(
        architecture="SmolLM3ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        window="by_type",
        rotation="listed",
        default_theta=2e6,
        default_kv_heads=4,
        default_max_positions=32768,
        ties_embeddings=True,
    ),
    _OLMO2,
    replace(
        _OLMO2,
        architecture="Olmo3ForCausalLM",
        window="by_type",
        default_window=4096,
        full_each=4,
        rotation="own_table",
        default_theta=5e5,
    ),
    _GLM4,
    replace(_GLM4, architecture="GlmForCausalLM", norms=Norms()),
    Family(
        architecture="SeedOssForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_out_bias",
        mlp_bias="mlp_bias",
        default_kv_heads=8,
        default_head_dim=128,
        default_max_positions=524288,
    ),
    Family(
        architecture="Ernie4_5ForCausalLM",
        qkv_bias="use_bias",
        o_bias="use_bias",
        mlp_bias="use_bias",
        pairs="neighbours",
        default_theta=5e5,
        default_kv_heads=2,
        default_head_dim=128,
        default_max_positions=131072,
        default_eps=1e-5,
        ties_embeddings=True,
    ),
    _COHERE,
    replace(
        _COHERE,
        architecture="Cohere2ForCausalLM",
        window="by_type",
        default_window=4096,
        full_each=4,
        rotation="windowed_alone",
        default_theta=1e4,
        default_head_dim=128,
    ),
    Family(
        architecture="Exaone4ForCausalLM",
        qk_norm="head",
        norms=_BEHIND,
        window="by_type",
        default_window=4096,
        full_each=4,
        rotation="windowed",
        default_kv_heads=32,
        default_eps=1e-5,
    ),
    _QWEN3_MOE,
    replace(
        _QWEN3_MOE,
        architecture="Qwen3VLMoeForConditionalGeneration",
        prefixes=_OF_WRAPPERS,
        text_type="qwen3_vl_moe_text",
        default_theta=5e5,
        default_kv_heads=16,
        default_max_positions=128000,
        ignored_rope_keys=frozenset({"mrope_section", "mrope_interleaved"}),
        experts=Experts(
            inner="moe_intermediate_size",
            default_inner=1408,
            default_count=60,
            default_top_k=4,
            layers="steps",
            stored="columns",
        ),
        restated=(("norm_topk_prob", True),),
    ),
    Family(
        architecture="Qwen2MoeForCausalLM",
        qkv_bias="qkv_bias",
        default_bias=True,
        window="qwen_moe",
        default_window=4096,
        default_kv_heads=16,
        default_max_positions=32768,
        experts=Experts(
            inner="moe_intermediate_size",
            default_inner=1408,
            default_count=60,
            default_top_k=4,
            normalised="norm_topk_prob",
            layers="steps",
            shared="shared_expert",
            shared_inner="shared_expert_intermediate_size",
            default_shared=5632,
            shared_gate="shared_expert_gate",
        ),
    ),
    Family(
        architecture="Glm4MoeForCausalLM",
        qkv_bias="attention_bias",
        qk_norm="head",
        qk_norm_key="use_qk_norm",
        rotary_share=0.5,
        default_heads=96,
        default_kv_heads=8,
        default_max_positions=131072,
        default_eps=1e-5,
        experts=replace(
            _BY_SIGMOID,
            default_count=128,
            default_top_k=8,
            default_normalised=True,
            default_first=1,
            default_shared=1,
        ),
        more_layers="num_nextn_predict_layers",
        restated=_ROUTED_SO,
    ),
    Family(
        architecture="Dots1ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="head",
        window="upper",
        default_window=4096,
        default_bound=62,
        default_heads=32,
        experts=replace(_BY_SIGMOID, default_shared=0),
        restated=_ROUTED_SO,
    ),
    Family(
        architecture="Ernie4_5_MoeForCausalLM",
        pairs="neighbours",
        default_theta=5e5,
        default_heads=20,
        default_kv_heads=4,
        default_max_positions=131072,
        default_eps=1e-5,
        ties_embeddings=True,
        experts=Experts(
            inner="moe_intermediate_size",
            default_inner=1536,
            count="moe_num_experts",
            default_count=64,
            top_k="moe_k",
            default_top_k=6,
            selection_bias=True,
            wide_router=True,
            least_sum="moe_norm_min",
            layers="between",
            shared="shared_experts",
            shared_count="moe_num_shared_experts",
            default_shared=2,
        ),
        more_layers="num_nextn_predict_layers",
        restated=(("use_bias", False), ("moe_use_aux_free", True), ("moe_gate", "topk")),
    ),
    replace(
        _OLMO2,
        architecture="FlexOlmoForCausalLM",
        default_theta=5e5,
        default_vocab_size=100352,
        default_heads=32,
        default_max_positions=4096,
        default_eps=1e-6,
        experts=Experts(default_inner=11008, default_count=7, default_top_k=5, normalised="norm_topk_prob"),
    ),
    Family(
        architecture="MixtralForCausalLM",
        window="all_layers",
        default_theta=1e6,
        default_kv_heads=8,
        default_max_positions=131072,
        default_eps=1e-5,
        experts=Experts(default_count=8, default_top_k=2),
    ),
    Family(
        architecture="OlmoeForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="row",
        default_max_positions=4096,
        default_eps=1e-5,
        experts=Experts(default_count=64, default_top_k=8, normalised="norm_topk_prob"),
    ),
    Family(
        architecture="AfmoeForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="head",
        norms=Norms(
            after_attention="post_attention_layernorm", mlp="pre_mlp_layernorm", after_mlp="post_mlp_layernorm"
        ),
        norm_form="wide",
        embeds_by_width="mup_enabled",
        window="by_type",
        default_window=1024,
        full_each=4,
        rotation="windowed_alone",
        default_vocab_size=200192,
        default_heads=16,
        default_head_dim=128,
        default_max_positions=16384,
        default_eps=1e-5,
        attention_gate="gate_proj",
        experts=Experts(
            inner="moe_intermediate_size",
            default_inner=1408,
            default_count=64,
            default_top_k=6,
            scoring="sigmoid",
            selection_bias=True,
            epsilon=1e-20,
            scale="route_scale",
            layers="behind",
            first="num_dense_layers",
            default_first=1,
            shared="shared_experts",
            shared_count="num_shared_experts",
            default_shared=2,
        ),
        restated=(
            *(("score_func", "sigmoid"), ("route_norm", True), ("n_group", 1), ("topk_group", 1)),
            *(("num_expert_groups", 1), ("num_limited_groups", 1)),
        ),
    ),
    Family(
        architecture="GptOssForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        default_bias=True,
        norm_form="wide",
        window="by_type",
        default_window=128,
        full_each=2,
        sinks=True,
        default_theta=150000.0,
        default_kv_heads=8,
        default_head_dim=64,
        default_max_positions=131072,
        default_eps=1e-5,
        experts=Experts(default_count=128, default_top_k=4, biases=True, activation="swiglu_clamped", stored="turned"),
        restated=(
            ("experts_per_token", 4),
            ("initial_context_length", 4096),
            ("swiglu_alpha", 1.702),
            ("swiglu_limit", 7.0),
        ),
    ),
)

FAMILIES: dict[str, Family] = {family.architecture: family for family in _FAMILIES}
