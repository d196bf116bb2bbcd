"""How a checkpoint's matrices are quantised, as `quantization_config` of its config.json says.

Every key is read, or stands in the list of those that say nothing about the stored numbers; any other is refused by
name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire_engine.execution.models.options import Options

Method = Literal["gptq", "awq", "fp8"]
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
    "compressed-tensors": "a GPTQ, AWQ or FP8 version of the model, or the original with --quantization int8 or int4",
    "eetq": "the original with --quantization int8",
    "exl2": "a GPTQ or AWQ version of the model",
    "exl3": "a GPTQ or AWQ version of the model",
    "fbgemm_fp8": "the original with --quantization int8",
    "hqq": "a GPTQ or AWQ version of the model",
    "modelopt": "the original with --quantization int8 or int4",
    "mxfp4": "a version of the model in bfloat16",
    "quanto": "the original with --quantization int8 or int4",
    "torchao": "the original with --quantization int8 or int4",
    "vptq": "a GPTQ or AWQ version of the model",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """The form of quantised matrices [N, K]: value = (stored - zero point) * scale."""

    method: Method
    bits: int = 8
    group_size: int | None = None  # of K, values that share a scale and a zero point; None: all of them
    zero_offset: int = 0  # to be added to stored zero points
    block: tuple[int, int] | None = None  # fp8: rows and columns that share a scale; None: `weight_scale` says it

    def __str__(self) -> str:
        return {"gptq": f"GPTQ, {self.bits} bits", "awq": "AWQ, 4 bits", "fp8": "FP8"}[self.method]


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
    block = section.raw("weight_block_size")
    if block is None:
        return Quantisation(method="fp8")
    if not isinstance(block, list) or len(block) != 2 or not all(type(each) is int and each > 0 for each in block):
        raise section.error(f"weight_block_size must be two positive integers, not {block!r}")
    return Quantisation(method="fp8", block=(block[0], block[1]))


def _group_size(section: Options) -> int | None:
    size = section.integer("group_size" if section.given("group_size") else "q_group_size", 128, least=-1)
    if size == 0:
        raise section.error("group_size=0 must be -1, for one group, or positive")
    return None if size < 0 else size


def _only(section: Options, key: str, taken: tuple[object, ...]) -> None:
    value = section.raw(key)
    if value is not None and value not in taken:
        raise section.error(f"{key}={value!r} is not supported; supported: {', '.join(map(repr, taken))}")
