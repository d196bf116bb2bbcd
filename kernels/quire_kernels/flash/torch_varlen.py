"""torch's own `varlen_attn`, a flash-attn 2 inside torch, as a library.

Promises: its signature decides, not its version: torch 2.12 supports blocks, 2.11 does not.

Masks and unused slots are as in flash-attn 2. Splitting contexts between programs is turned off: with pages, it leaves
rows of sequences after the first unwritten, and it is on by default.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire_kernels.flash.library import Loaded, require_parameters, unsupported, whole_pages, window_of
from quire_kernels.flash.part import Part
from quire_kernels.kernel_set import AttentionShape, KVFormat
from quire_kernels.provider import Unavailable

PAGE = 256  # tokens
CAUSAL = (-1, 0)  # a window
_VARLEN = (
    *("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"),
    *("scale", "window_size", "enable_gqa", "seqused_k", "block_table", "num_splits"),
)


class TorchVarlen:
    name = "torch's varlen_attn"

    def why_not(self, kv: KVFormat, capability: tuple[int, int]) -> str | None:
        return unsupported(kv, capability) or whole_pages(kv, PAGE)

    def load(self) -> Loaded:
        try:
            from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415
        except ImportError as error:
            raise Unavailable("is not in this torch (2.12 and newer have one that takes blocks)") from error
        if not torch.backends.cuda.is_flash_attention_available():
            raise Unavailable("is not available: this torch was built without flash attention")
        return loaded(varlen_attn, version=torch.__version__)


def loaded(varlen_attn: Callable[..., object], *, version: str) -> Loaded:
    """The library with this function. Raises Unavailable if its parameters are unknown."""
    require_parameters(varlen_attn, _VARLEN)

    def attend(q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape, part: Part) -> Tensor:
        out = varlen_attn(
            query=q,
            key=k,
            value=v,
            cu_seq_q=part.query_starts,
            cu_seq_k=part.context_starts,
            max_q=part.max_rows,
            max_k=part.max_context_len,
            scale=shape.scale,
            window_size=CAUSAL if shape.window is None else window_of(shape),
            enable_gqa=shape.num_heads != shape.num_kv_heads,
            seqused_k=part.context_lens,
            block_table=part.block_tables,
            num_splits=1,
        )
        assert isinstance(out, Tensor)  # a pair is returned only on request
        return out

    return Loaded(version=version, attend=attend, decodes_apart=True)
