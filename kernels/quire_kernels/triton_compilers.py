"""Tells when Triton compiles a kernel, which takes seconds and is no sign of a kernel that hangs.

Must not know: the engine, torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable


def tell_compilers(tell: Callable[[bool], None]) -> None:
    """Call `tell` with True before this process compiles a kernel and with False afterwards, where there is Triton."""
    if importlib.util.find_spec("triton") is None:
        return
    import triton  # noqa: PLC0415 - only a process that runs its kernels needs it

    def before(**_: object) -> None:
        tell(True)

    def after(**_: object) -> None:
        tell(False)

    triton.knobs.runtime.jit_cache_hook = before
    triton.knobs.runtime.jit_post_compile_hook = after
