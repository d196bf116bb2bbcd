"""Which event loop the commands run on: uvloop where there is one.

Promises: a factory for `asyncio.Runner`; only this module knows uvloop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Makes a new event loop."""
    try:
        from uvloop import new_event_loop  # noqa: PLC0415  # not on every platform
    except ImportError:
        return asyncio.new_event_loop
    return new_event_loop
