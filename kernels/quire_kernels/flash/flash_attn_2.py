"""The package flash-attn 2 as a library.

Promises: single rows go to `flash_attn_with_kvcache`, which may split a long context between programs, all others to
`flash_attn_varlen_func`, which does not.

Both align the causal mask and the window to the last key of a sequence, which is the last row's own. Slots after a
sequence's end have no effect: values there count as zeros, scores are masked.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from quire_kernels.flash.library import Loaded, require_parameters, unsupported, whole_pages, window_of
from quire_kernels.flash.part import Part
from quire_kernels.kernel_set import AttentionShape, KVFormat
from quire_kernels.provider import Unavailable

PAGE = 256  # tokens
_COMMON = ("q", "softmax_scale", "causal", "window_size", "block_table")
_VARLEN = (*_COMMON, "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_KVCACHE = (*_COMMON, "k_cache", "v_cache", "cache_seqlens")


class FlashAttn2:
    name = "flash-attn 2"

    def why_not(self, kv: KVFormat, capability: tuple[int, int]) -> str | None:
        return unsupported(kv, capability) or whole_pages(kv, PAGE)

    def load(self) -> Loaded:
        try:
            import flash_attn  # noqa: PLC0415

            found = flash_attn.flash_attn_varlen_func, flash_attn.flash_attn_with_kvcache
        except ModuleNotFoundError as error:
            if error.name != "flash_attn":
                raise Unavailable(f"cannot be loaded: {error}") from error
            raise Unavailable("is not installed (pip install --no-build-isolation 'quire[flash]')") from error
        except (
            ImportError,
            OSError,
            AttributeError,
        ) as error:  # built for another torch, or only flash-attn 4 is installed
            raise Unavailable(f"cannot be loaded: {error}") from error
        return loaded(*found, version=str(getattr(flash_attn, "__version__", "unknown")))


def loaded(varlen: Callable[..., Tensor], with_kvcache: Callable[..., Tensor], *, version: str) -> Loaded:
    """The library with these two functions. Raises Unavailable if their parameters are unknown."""
    require_parameters(varlen, _VARLEN)
    require_parameters(with_kvcache, _KVCACHE)
    # Splitting a context mixes up the rows of packed sequences over pages; versions with splitting do it by default.
    unsplit = {"num_splits": 1} if _takes(varlen, "num_splits") else {}

    def attend(q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape, part: Part) -> Tensor:
        window = window_of(shape)
        if part.decodes:
            out = with_kvcache(
                q=q.unsqueeze(1),
                k_cache=k,
                v_cache=v,
                cache_seqlens=part.context_lens,
                block_table=part.block_tables,
                softmax_scale=shape.scale,
                causal=True,
                window_size=window,
            )
            return out.squeeze(1)
        return varlen(
            q=q,
            k=k,
            v=v,
            cu_seqlens_q=part.query_starts,
            cu_seqlens_k=part.context_starts,
            max_seqlen_q=part.max_rows,
            max_seqlen_k=part.max_context_len,
            softmax_scale=shape.scale,
            causal=True,
            window_size=window,
            block_table=part.block_tables,
            **unsplit,
        )

    return Loaded(version=version, attend=attend, decodes_apart=True)


def _takes(function: Callable[..., Tensor], parameter: str) -> bool:
    try:
        require_parameters(function, (parameter,))
    except Unavailable:
        return False
    return True
