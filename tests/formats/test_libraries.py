"""Quantised formats: every number is what the format's own library finds in the same tensors, in float32.

Run by `make format-test`, which brings the libraries: compressed-tensors, and GPTQModel for GPTQ and AWQ; transformers
has FP8's. Where a library would compute in 16 bits, it is given the same scales in float32.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quire_engine.execution.models.checkpoint import open_checkpoint
from quire_engine.execution.models.config import load_model_config
from quire_engine.execution.models.weights import take_text
from support.quantised import FORMS, Form, fp8, make_quantised

os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
# The blocks of FORMS do not divide their matrices; transformers takes none but those that do.
WHOLE_BLOCKS = Form(FORMS["fp8 by block"].config | {"weight_block_size": [16, 16]}, fp8((16, 16)))
ALL = FORMS | {"fp8 by whole blocks": WHOLE_BLOCKS}
Parts = dict[str, Tensor]


def of_gptq(parts: Parts, config: dict[str, Any]) -> Tensor:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import FORMAT
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    bits = config["bits"]
    rows, columns = parts["qweight"].shape[1], parts["qweight"].shape[0] * 32 // bits
    first = config.get("checkpoint_format", "gptq") == "gptq"
    linear = TorchLinear(
        bits=bits,
        group_size=config["group_size"],
        sym=config.get("sym", True),
        desc_act=config.get("desc_act", False),
        in_features=columns,
        out_features=rows,
        format=FORMAT.GPTQ if first else FORMAT.GPTQ_V2,
    )
    for name, part in parts.items():
        setattr(linear, name, part.float() if name == "scales" else part.clone())
    if first:
        convert_gptq_v1_to_v2_format_module(linear, bits, torch.int32)
    linear.post_init()
    found: Tensor = linear.dequantize_weight()
    return found.T


def of_awq(parts: Parts, config: dict[str, Any]) -> Tensor:
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    found: Tensor = dequantize_gemm(
        parts["qweight"], parts["qzeros"], parts["scales"].float(), config["bits"], config["group_size"]
    )
    return found.T


def of_fp8(parts: Parts, config: dict[str, Any]) -> Tensor:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    scale = parts["weight_scale_inv" if "weight_block_size" in config else "weight_scale"]
    found: Tensor = Fp8Dequantize(None)._dequantize_one(parts["weight"], scale, torch.float32)
    return found


def of_compressed_tensors(parts: Parts, config: dict[str, Any]) -> Tensor:
    from compressed_tensors.compressors.quantized_compressors.fp4_quantized import unpack_fp4_from_uint8
    from compressed_tensors.compressors.quantized_compressors.pack_quantized import unpack_from_int32
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    scheme = QuantizationScheme(**copy.deepcopy(config["config_groups"]["group_0"]))
    weights, form = scheme.weights, config["format"]
    scale, zeros = parts["weight_scale"], parts.get("weight_zero_point")
    if form == "mxfp4-pack-quantized":
        scale = torch.exp2(scale.float() - 127)  # the library's own way takes 16 bits
    if "weight_packed" not in parts:
        stored = parts["weight"]
    elif form.endswith("fp4-pack-quantized"):
        rows, pairs = parts["weight_packed"].shape
        stored = unpack_fp4_from_uint8(parts["weight_packed"], rows, 2 * pairs, dtype=torch.float32)
    else:
        shape = torch.Size(parts["weight_shape"].tolist())
        stored = unpack_from_int32(parts["weight_packed"], weights.num_bits, shape)
        if zeros is not None:
            zeros = unpack_from_int32(zeros, weights.num_bits, torch.Size((shape[0], scale.shape[1])), packed_dim=0)
    found: Tensor = dequantize(
        x_q=stored,
        scale=scale.float(),
        zero_point=zeros,
        args=weights,
        g_idx=parts.get("weight_g_idx"),
        global_scale=parts.get("weight_global_scale"),
        dtype=torch.float32,
    )
    return found


LIBRARIES = {"gptq": of_gptq, "awq": of_awq, "fp8": of_fp8, "compressed-tensors": of_compressed_tensors}


@pytest.mark.parametrize("name", [name for name in ALL if name != "fp8 by block"])
def test_every_number_is_its_own_library_s(name: str, tmp_path: Path) -> None:
    form = ALL[name]
    quantised, _ = make_quantised(tmp_path, form)
    stored = load_file(str(quantised / "model.safetensors"))
    matrices: dict[str, Parts] = {}
    for full, part in stored.items():
        matrices.setdefault(full.rpartition(".")[0], {})[full.rpartition(".")[2]] = part
    matrices = {module: parts for module, parts in matrices.items() if parts.keys() - {"weight"}}
    assert len(matrices) >= 7
    with open_checkpoint(quantised) as checkpoint:
        take_text(checkpoint, load_model_config(quantised))
        for module, parts in matrices.items():
            parts.pop("input_scale", None)
            parts.pop("input_global_scale", None)
            wanted = LIBRARIES[form.config["quant_method"]](parts, form.config)
            ours = checkpoint.tensor(module + ".weight")
            assert wanted.dtype == ours.dtype == torch.float32
            assert torch.equal(wanted, ours), f"{module}: {(wanted - ours).abs().max()} apart"
