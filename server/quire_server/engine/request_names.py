"""Maps the names that clients know a request by to the engine's request ids.

Promises: bounded; a name finds its latest request. Must not know: HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable

MOST_IDS = 8192
# Prefixes of the ids in replies: completions, chats, messages, vectors, scores.
_PREFIXES = ("cmpl-", "chatcmpl-", "msg_", "embd-", "score-")


class RequestNames:
    """The engine's ids are random and never sent to clients; only this map has both."""

    def __init__(self) -> None:
        self._ids: dict[str, tuple[str, ...]] = {}  # the oldest name first
        self._name_of: dict[str, str] = {}

    def add(self, names: Iterable[str | None], request_ids: Iterable[str]) -> None:
        """The first name is the one that operators see."""
        ids, known = tuple(request_ids)[:MOST_IDS], list(dict.fromkeys(filter(None, names)))
        for name in known:
            self._forget(name)
            self._ids[name] = ids
        self._name_of |= dict.fromkeys(ids, known[0])
        while len(self._name_of) > MOST_IDS:
            self._forget(next(iter(self._ids)))

    def find(self, name: str) -> tuple[str, ...]:
        """The engine's ids for an x-request-id, a reply's id, or an engine's id itself."""
        if name in self._name_of:
            return (name,)
        bare = next((name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), name)
        return self._ids.get(name) or self._ids.get(bare) or (name,)

    def name(self, request_id: str) -> str | None:
        """The client's name for a request of the engine."""
        return self._name_of.get(request_id)

    def _forget(self, name: str) -> None:
        for request_id in self._ids.pop(name, ()):
            if self._name_of.get(request_id) == name:
                del self._name_of[request_id]
