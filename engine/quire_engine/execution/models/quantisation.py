"""How a checkpoint's matrices are quantised, as `quantization_config` of its config.json says.

Every key is read, or stands in the list of those that say nothing about the stored numbers; any other is refused by
name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire_engine.execution.models.options import Options

Method = Literal[
    "gptq",
    "awq",
    "fp8",
    "mxfp4",
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "gguf",
]
# Of matrices in FP4: the strategy and the values that share a scale, e4m3 and one of the matrix, or a power of two.
_FP4: dict[str, tuple[Method, str, int]] = {
    "nvfp4-pack-quantized": ("nvfp4-pack-quantized", "tensor_group", 16),
    "mxfp4-pack-quantized": ("mxfp4-pack-quantized", "group", 32),
}
_KEY = "quantization_config"
# Keys of how the numbers were found, and of the kernels that others compute them with. The names of the tensors say
# which matrices are quantised.
_HARMLESS = frozenset(
    [
        "act_group_aware",
        "autoround_version",
        "backend",
        "batch_size",
        "block_name_to_quantize",
        "cache_block_outputs",
        "cache_examples_on_gpu",
        "damp_auto_increment",
        "damp_percent",
        "dataset",
        "disable_exllama",
        "do_fuse",
        "exllama_config",
        "fuse_max_seq_len",
        "ignored_layers",
        "iters",
        "low_gpu_mem_usage",
        "lr",
        "max_input_length",
        "meta",
        "minmax_lr",
        "model_file_base_name",
        "model_name_or_path",
        "model_seqlen",
        "module_name_preceding_first_block",
        "modules_in_block_to_quantize",
        "modules_to_fuse",
        "modules_to_not_convert",
        "mse",
        "nsamples",
        "offload_to_disk",
        "pad_token_id",
        "quantizer",
        "static_groups",
        "sym",
        "tokenizer",
        "true_sequential",
        "use_cuda_fp16",
        "use_exllama",
        "version_gptq",
    ]
)
# Methods that are not read, and what to use in their place.
_OTHERS = {
    "aqlm": "a GPTQ or AWQ version of the model",
    "auto-round": "its GPTQ or AWQ export",
    "bitsandbytes": "the checkpoint that it was made from, with --quantization int8 or int4",
    "eetq": "the original with --quantization int8",
    "exl2": "a GPTQ or AWQ version of the model",
    "exl3": "a GPTQ or AWQ version of the model",
    "fbgemm_fp8": "the original with --quantization int8",
    "hqq": "a GPTQ or AWQ version of the model",
    "modelopt": "the original with --quantization int8 or int4",
    "quanto": "the original with --quantization int8 or int4",
    "torchao": "the original with --quantization int8 or int4",
    "vptq": "a GPTQ or AWQ version of the model",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """The form of quantised matrices [N, K]: value = (stored - zero point) * scale. Of GGUF each says its own."""

    method: Method
    bits: int = 8
    group_size: int | None = None  # of K, values that share a scale and a zero point; None: all of them
    zero_offset: int = 0  # to be added to stored zero points
    block: tuple[int, int] | None = None  # rows and columns that share a scale; None: one a row, or one
    symmetric: bool = False  # pack-quantized: every zero point is the middle, and none is stored
    types: str = ""  # gguf: the types of the matrices
    main_type: str = ""  # gguf: of the file as a whole, such as Q4_K_M
    interleaved: bool = False  # gguf: what rotates together in a head of queries or keys lies side by side

    def __str__(self) -> str:
        if self.method == "gguf":
            return f"GGUF, {self.types}"
        if self.method in _FP4:
            return f"compressed-tensors, {self.method.partition('-')[0].upper()}"
        names = {"gptq": f"GPTQ, {self.bits} bits", "awq": "AWQ, 4 bits", "fp8": "FP8", "mxfp4": "MXFP4"}
        return names.get(self.method, f"compressed-tensors, {self.method}, {self.bits} bits")


def quantisation_of(options: Options) -> Quantisation | None:
    """The quantisation that a config.json declares; None: there is none. Raises ModelLoadError, naming the key."""
    if not options.given(_KEY):
        return None
    section = options.section(_KEY)
    method = section.text("quant_method", "")
    if not method:
        raise section.error("quant_method is missing")
    if method == "gptq":
        found = _gptq(section)
    elif method == "awq":
        found = _awq(section)
    elif method == "fp8":
        found = _fp8(section)
    elif method == "mxfp4":
        _only(section, "dequantize", (False,))
        found = Quantisation(method="mxfp4", bits=4, group_size=32)
    elif method == "compressed-tensors":
        found = _compressed_tensors(section)
    elif method == "gguf":  # as the server derives it from the file's metadata
        interleaved = section.boolean("interleaved", False)
        types, main_type = section.text("types", ""), section.text("main_type", "")
        found = Quantisation(method="gguf", types=types, main_type=main_type, interleaved=interleaved)
    else:
        use = _OTHERS.get(method, "a GPTQ, AWQ or FP8 version of the model")
        raise section.error(f"quant_method={method!r} is not read; use {use}")
    unknown = sorted(key for key in section.unread() - _HARMLESS if section.given(key))
    if unknown:
        raise section.error(f"{', '.join(unknown)}: not known of {method}, so the numbers might be others")
    return found


def _gptq(section: Options) -> Quantisation:
    bits = section.integer("bits")
    if bits not in {2, 4, 8}:
        raise section.error(f"bits={bits} is not supported; supported: 2, 4, 8")
    section.boolean("desc_act", False)  # the tensors g_idx say it column by column
    _only(section, "checkpoint_format", ("gptq", "gptq_v2"))
    _only(section, "pack_dtype", ("int32",))
    _only(section, "is_marlin_format", (False,))
    _only(section, "lm_head", (False,))
    if section.raw("dynamic"):
        raise section.error("dynamic: matrices of different forms are not supported")
    # The first version of the format subtracted 1 from the zero points before it stored them.
    offset = 0 if section.text("checkpoint_format", "gptq") == "gptq_v2" else 1
    return Quantisation(method="gptq", bits=bits, group_size=_group_size(section), zero_offset=offset)


def _awq(section: Options) -> Quantisation:
    _only(section, "bits", (4,))
    _only(section, "w_bit", (4,))
    _only(section, "version", ("gemm", "GEMM"))
    _only(section, "zero_point", (True,))
    return Quantisation(method="awq", bits=4, group_size=_group_size(section))


def _fp8(section: Options) -> Quantisation:
    _only(section, "fmt", ("e4m3", "float8_e4m3fn"))
    _only(section, "activation_scheme", ("dynamic", "static"))  # of activations, which stay as they are
    _only(section, "scale_fmt", ("float", "ue8m0"))  # a float32 in the file in any case
    return Quantisation(method="fp8", block=_block(section, "weight_block_size"))


def _compressed_tensors(section: Options) -> Quantisation:
    """One scheme for all groups of matrices. The names of the tensors say what `ignore` and `targets` do."""
    for key in ("ignore", "quantization_status", "global_compression_ratio", "version"):
        section.raw(key)
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if section.raw(key):
            raise section.error(f"{key}: it changes the numbers, and is not supported")
    groups = section.section("config_groups")
    found = {_group(groups.section(key), section.text("format", "")) for key in sorted(groups.keys())}
    if len(found) != 1:
        raise section.error(f"config_groups must have one form of weights, not {len(found)}")
    return found.pop()


def _group(group: Options, form: str) -> Quantisation:
    for key in ("targets", "input_activations"):  # activations stay as they are
        group.raw(key)
    _only(group, "output_activations", ())
    form = group.text("format", "") or form
    weights = group.section("weights")
    for key in ("observer", "observer_kwargs", "scale_dtype", "zp_dtype", "actorder"):  # g_idx tells the order
        weights.raw(key)
    _only(weights, "dynamic", (False,))
    bits, kind = weights.integer("num_bits"), weights.text("type", "int")
    symmetric = weights.boolean("symmetric", True)
    strategy = weights.text("strategy", "tensor")
    if form == "pack-quantized" and kind == "int" and bits in {4, 8} and strategy in {"group", "channel"}:
        size = _group_size(weights) if strategy == "group" else None
        found = Quantisation(method="pack-quantized", bits=bits, group_size=size, symmetric=symmetric)
    elif form == "int-quantized" and (kind, bits, symmetric) == ("int", 8, True) and strategy in {"channel", "tensor"}:
        found = Quantisation(method="int-quantized")
    elif form in _FP4 and (kind, bits, symmetric) == ("float", 4, True) and strategy == _FP4[form][1]:
        method, _, size = _FP4[form]
        _only(weights, "group_size", (size,))
        found = Quantisation(method=method, bits=4, group_size=size)
    elif form == "float-quantized" and (kind, bits, symmetric) == ("float", 8, True):
        if strategy not in {"channel", "tensor", "block"}:
            raise weights.error(f"strategy={strategy!r} is not supported with {form}")
        found = Quantisation(method="float-quantized", block=_block(weights, "block_structure"))
    else:
        raise weights.error(
            f"format={form!r} with type={kind!r}, num_bits={bits}, strategy={strategy!r}, symmetric={symmetric} is not"
            " read; use a version with W4A16, W8A16, W8A8, FP8, NVFP4 or MXFP4 weights"
        )
    weights.raw("group_size")
    weights.raw("block_structure")
    unknown = sorted(key for part in (group, weights) for key in part.unread() if part.given(key))
    if unknown:
        raise group.error(f"{', '.join(unknown)}: not known of compressed-tensors, so the numbers might be others")
    return found


def _block(section: Options, key: str) -> tuple[int, int] | None:
    block = section.raw(key)
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or not all(type(each) is int and each > 0 for each in block):
        raise section.error(f"{key} must be two positive integers, not {block!r}")
    return block[0], block[1]


def _group_size(section: Options) -> int | None:
    size = section.integer("group_size" if section.given("group_size") else "q_group_size", 128, least=-1)
    if size == 0:
        raise section.error("group_size=0 must be -1, for one group, or positive")
    return None if size < 0 else size


def _only(section: Options, key: str, taken: tuple[object, ...]) -> None:
    value = section.raw(key)
    if value is not None and value not in taken:
        raise section.error(f"{key}={value!r} is not supported; supported: {', '.join(map(repr, taken))}")
