"""flash-attn 3 (the module `flash_attn_interface`, built from the same sources as flash-attn 2) as a library.

Promises: one call per layer, whatever rows a step has.

The causal mask and the window are aligned to the last key of a sequence, which is the last row's own. Pages as large as
its tiles of keys, the smallest of which has 64, may be loaded whole, with stale values in unused slots. They are
multiplied by zero, but NaN times zero is NaN. Smaller pages are loaded slot by slot, with zeros for unused slots.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from quire_kernels.flash.library import Loaded, require_parameters, unsupported, window_of
from quire_kernels.flash.part import Part
from quire_kernels.kernel_set import AttentionShape, KVFormat
from quire_kernels.provider import Unavailable

CAPABILITY = (9, 0)
LEAST_TILE = 64  # keys
_KVCACHE = (
    *("q", "k_cache", "v_cache", "cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q"),
    *("softmax_scale", "causal", "window_size"),
)


class FlashAttn3:
    name = "flash-attn 3"

    def why_not(self, kv: KVFormat, capability: tuple[int, int]) -> str | None:
        if capability != CAPABILITY:
            have, need = (".".join(map(str, each)) for each in (capability, CAPABILITY))
            return f"needs a GPU of compute capability {need}, this one has {have}"
        if kv.block_size >= LEAST_TILE:
            return (
                f"takes blocks of less than {LEAST_TILE} tokens, not {kv.block_size}: from larger ones what a failed "
                "request left may reach another's results (set block_size to 16)"
            )
        return unsupported(kv, capability)

    def load(self) -> Loaded:
        try:
            import flash_attn_interface  # noqa: PLC0415

            found = flash_attn_interface.flash_attn_with_kvcache
        except ModuleNotFoundError as error:
            if error.name != "flash_attn_interface":
                raise Unavailable(f"cannot be loaded: {error}") from error
            raise Unavailable(
                "is not installed (it is built from the folder hopper of flash-attn's sources)"
            ) from error
        except (ImportError, OSError, AttributeError) as error:  # built for another torch
            raise Unavailable(f"cannot be loaded: {error}") from error
        return loaded(found, version=str(getattr(flash_attn_interface, "__version__", "unknown")))


def loaded(with_kvcache: Callable[..., Tensor], *, version: str) -> Loaded:
    """The library with this function. Raises Unavailable if its parameters are unknown."""
    require_parameters(with_kvcache, _KVCACHE)

    def attend(q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape, part: Part) -> Tensor:
        return with_kvcache(
            q=q,
            k_cache=k,
            v_cache=v,
            cache_seqlens=part.context_lens,
            page_table=part.block_tables,
            cu_seqlens_q=part.query_starts,
            max_seqlen_q=part.max_query_len,
            softmax_scale=shape.scale,
            causal=True,
            window_size=window_of(shape),
        )

    return Loaded(version=version, attend=attend, decodes_apart=False)
