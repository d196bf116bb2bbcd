"""The directory of Triton's compiled kernels.

Promises: loaded code, for the GPU and shared libraries for the host, comes from a directory that only this user can
write, otherwise from a temporary one of this process.
"""

from __future__ import annotations

import atexit
import logging
import shutil
import tempfile
from pathlib import Path

import triton

from quire_kernels.trusted_folder import trusted

_log = logging.getLogger(__name__)


def use_private_cache() -> None:
    """Let Triton use its cache directory if only this user can write it. Called before the first kernel is compiled."""
    cache = triton.knobs.cache
    try:
        trusted(Path(cache.dir).expanduser())
    except OSError as error:
        private = tempfile.mkdtemp(prefix="quire-triton-")
        atexit.register(shutil.rmtree, private, ignore_errors=True)
        cache.dir = private
        _log.warning("Triton's kernels cannot be kept (%s): they are compiled at every start", error)
