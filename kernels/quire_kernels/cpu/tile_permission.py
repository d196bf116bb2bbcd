"""Whether this process may use the tile registers of AMX, for which Linux wants to be asked.

Promises: asks once a process, for all its threads and children; says why where the answer is no.
Must not know: variants, compilers, what tiles are for.
"""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache

_ARCH_PRCTL = 158  # the system call's number on x86-64
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


@cache
def tile_refusal() -> str | None:
    """Why the tile registers must not be touched here, or None: they may."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        return "only Linux on x86-64 has them"
    libc = ctypes.CDLL(None, use_errno=True)
    asked = (ctypes.c_long(number) for number in (_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA))
    if libc.syscall(*asked) == 0:
        return None
    # EINVAL: a kernel before 5.16, or no such registers; ENOSPC: a thread's stack for signals has no room for them.
    return f"the kernel refuses the tile registers ({os.strerror(ctypes.get_errno())})"
