"""How many blocks must be available before a group may enter.

Promises: a fresh group enters with everything it knows reserved; a preempted one does not ping-pong.
Must not know: who else waits, how blocks are found.
"""

from __future__ import annotations

from quire_engine.scheduling.sequence import Group


class WholePrompt:
    """Admission by blocks: reserve the whole prompt and nothing for the output, so that a full pool preempts.

    Does not apply to the elder, whose blocks are made available. A preempted group re-enters only when one block more
    than its need is available. Without it, it would take the last block, lose it to the next decode that grows, and be
    computed again for nothing.
    """

    def fits(self, group: Group, *, need: int, available: int) -> bool:
        """`need`: blocks for all tokens the group knows, the cached prefix discounted."""
        return need + (1 if group.state == "preempted" else 0) <= available
