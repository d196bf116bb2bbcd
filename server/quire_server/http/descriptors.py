"""How many files the process may have open, of which every connection is one.

Promises: connections up to the limit that is set can be accepted where the system allows it, and a line says where not.
Must not know: connections themselves.

Without this a shell's usual 1,024 are spent before `--max-connections` is: whoever comes then is not refused but waits,
since the event loop cannot accept, and nothing else can be opened either.
"""

from __future__ import annotations

import logging
import resource

_OTHERS = 512  # logs, pipes to workers, the engine's sockets, libraries
_log = logging.getLogger(__name__)


def allow_connections(number: int) -> None:
    """Raise the soft limit to what so many connections need, with as many again that read why they are refused."""
    needed = 2 * number + _OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (OSError, ValueError):  # a sandbox that lets nobody change it: serving with fewer beats not serving
        allowed = soft
    if allowed < needed:
        _log.warning(
            "the system allows this process %d open files, and %d connections need %d: raise the hard limit"
            " (ulimit -Hn, LimitNOFILE=) or lower --max-connections",
            allowed,
            number,
            needed,
        )
