"""Random blocks of the types that GGUF files store, with scales that are sane numbers, and what they stand for.

Promises: the numbers are those of the format's own library. Must not know: the decoder under test.
"""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

# Where the scales of 16 bits lie in a block.
_SCALES = {
    **{"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,)},
    **{"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (), "NVFP4": ()},
}
# Roughly the greatest value in scales, so that matrices of all types have numbers of one size.
_REACH = {
    **{"Q4_0": 8, "Q4_1": 15, "Q5_0": 16, "Q5_1": 31, "Q8_0": 127, "Q2_K": 45, "Q3_K": 120, "Q4_K": 900},
    **{"Q5_K": 1800, "Q6_K": 4000, "IQ4_NL": 120, "IQ4_XS": 3800},
}
QUANTISED = tuple(_SCALES)


def random_blocks(kind: str, rows: int, columns: int, random: np.random.Generator) -> NDArray[np.uint8]:
    """[rows, bytes of a row]; the numbers lie in about -0.3 to 0.3."""
    values, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = random.integers(0, 256, (rows * columns // values, size), dtype=np.uint8)
    for at in _SCALES[kind]:
        scales = random.uniform(0.5, 1.0, (len(blocks), 1)) * random.choice([-1, 1], (len(blocks), 1))
        blocks[:, at : at + 2] = (scales * 0.3 / _REACH[kind]).astype(np.float16).view(np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = random.integers(118, 123, len(blocks))
    if kind == "NVFP4":
        blocks[:, :4] = random.integers(0, 30, (len(blocks), 4))
    return blocks.reshape(rows, -1)


def numbers(kind: str, rows: Any) -> NDArray[np.float32]:
    """[rows, bytes of a row] -> [rows, columns]."""
    found: NDArray[np.float32] = gguf.quants.dequantize(rows, GGMLQuantizationType[kind])
    return found
