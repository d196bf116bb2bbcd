"""The event loop of the commands: uvloop where it is installed.

Promises: a factory for `asyncio.Runner`; only this module imports uvloop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """The function that makes a new event loop."""
    try:
        from uvloop import new_event_loop  # noqa: PLC0415  # not on every platform
    except ImportError:
        return asyncio.new_event_loop
    return new_event_loop
