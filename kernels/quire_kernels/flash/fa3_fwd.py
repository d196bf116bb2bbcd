"""fa3-fwd (the module `fa3_fwd_interface`): flash-attn 3's forward as a wheel, for prompts.

Promises: its keys and values are copied into one piece first, once a layer, as the wheel is compiled without pages.

It is compiled without windows and without fp16 too: layers with a window, and rows that are alone in their sequences,
are computed by the kernels' own attention, and the trial refuses models in fp16.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from torch import Tensor

from quire_kernels.flash.library import Loaded, require_parameters, unsupported
from quire_kernels.flash.part import Part
from quire_kernels.kernel_set import AttentionShape, KVFormat
from quire_kernels.provider import Unavailable

CAPABILITY = (9, 0)
_VARLEN = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal")


class Fa3Fwd:
    name = "fa3-fwd"

    def why_not(self, kv: KVFormat, capability: tuple[int, int]) -> str | None:
        if capability != CAPABILITY:
            have, need = (".".join(map(str, each)) for each in (capability, CAPABILITY))
            return f"needs a GPU of compute capability {need}, this one has {have}"
        return unsupported(kv, capability)

    def load(self) -> Loaded:
        try:
            import fa3_fwd_interface  # noqa: PLC0415

            found = fa3_fwd_interface.flash_attn_varlen_func
        except ModuleNotFoundError as error:
            if error.name != "fa3_fwd_interface":
                raise Unavailable(f"cannot be loaded: {error}") from error
            raise Unavailable("is not installed (pip install fa3-fwd)") from error
        except (ImportError, OSError, AttributeError, RuntimeError) as error:  # made for another torch or CUDA
            raise Unavailable(f"cannot be loaded: {' '.join(str(error).split())}") from error
        return loaded(found, version=_version())


def _version() -> str:
    try:
        return version("fa3-fwd")
    except PackageNotFoundError:
        return "unknown"


def loaded(varlen: Callable[..., Tensor], *, version: str) -> Loaded:
    """The library with this function. Raises Unavailable if its parameters are unknown."""
    require_parameters(varlen, _VARLEN)

    def attend(q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape, part: Part) -> Tensor:
        assert part.blocks is not None
        assert part.offsets is not None
        return varlen(
            q=q,
            k=k[part.blocks, part.offsets],
            v=v[part.blocks, part.offsets],
            cu_seqlens_q=part.query_starts,
            cu_seqlens_k=part.context_starts,
            max_seqlen_q=part.max_query_len,
            max_seqlen_k=part.max_context_len,
            softmax_scale=shape.scale,
            causal=True,
        )

    return Loaded(
        version=version, attend=attend, decodes_apart=True, decodes=False, windows=False, needs_one_piece=True
    )
