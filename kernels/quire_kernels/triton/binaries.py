"""Where Triton keeps what it compiled, and loads it from again.

Promises: what is loaded, code for the GPU and shared libraries for the host, comes from a folder of this user's that
nobody else may write to, else from one that is made for this process.
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


def keep_to_ourselves() -> None:
    """Have Triton use its own folder where that can be trusted. Called before the first kernel is compiled."""
    cache = triton.knobs.cache
    try:
        trusted(Path(cache.dir).expanduser())
    except OSError as error:
        private = tempfile.mkdtemp(prefix="quire-triton-")
        atexit.register(shutil.rmtree, private, ignore_errors=True)
        cache.dir = private
        _log.warning("Triton's kernels cannot be kept (%s): they are compiled at every start", error)
