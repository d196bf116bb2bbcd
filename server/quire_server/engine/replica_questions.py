"""Answers an operator's questions about several engines: each request is asked of the replica that has or had it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from quire_engine.contract.errors import EngineDead, QuireError, Unanswerable
from quire_engine.contract.types import LOAD_ADAPTER
from quire_server.engine.replica_routing import RouteTaken

EPOCH = "~"  # between a request's id and the number of its engine; no id has it
_LISTS = {"request": "requests", "table": "sequences"}  # what the answers about named requests list


class Asked(Protocol):
    """The supervisor of one replica, which answers for it."""

    async def inspect(self, what: str, argument: str = "{}") -> bytes: ...
    async def control(self, what: str, argument: str = "{}") -> bytes: ...


Find = Callable[[str], tuple[str, str] | None]  # of a client's request id: the replica, and the id there


class ReplicaQuestions:
    """Questions and orders over all replicas."""

    def __init__(
        self, replicas: Mapping[str, Asked], find: Find, routes: Callable[[str], Sequence[RouteTaken]] = lambda _: ()
    ) -> None:
        """`replicas` by name; the mapping may grow. `routes`: of a client's request id."""
        self._replicas = replicas
        self._find = find
        self._routes = routes

    async def inspect(self, what: str, argument: str = "{}") -> bytes:
        """Answer like `Supervisor.inspect`: about requests from the replicas that have them, else from one replica.

        That is `replica` of the argument, or the first one; lists of requests are of all.
        """
        asked: dict[str, Any] = msgspec.json.decode(argument)
        name = str(asked.pop("replica", "") or "")
        if "ids" in asked:
            return await self._of_requests(what, asked)
        if name and name not in self._replicas:
            raise Unanswerable(f"there is no replica {name!r}; there are {', '.join(self._replicas)}")
        if what != "requests":
            return await self._replicas[name or next(iter(self._replicas))].inspect(what, _json(asked))
        chosen = [name] if name else list(self._replicas)
        return _merged(await self._ask([(each, asked) for each in chosen], what), ("live", "ended"))

    async def control(self, names: Sequence[str], what: str, argument: str = "{}") -> bytes:
        """The sum of an order's effects on these replicas. Raises as `Supervisor.control` does, if any does.

        An adapter is loaded by one of them, which tells whether its files are good; the others load it with their first
        request for it.
        """
        if not names:
            raise EngineDead("no engine is there to be asked")
        if what == LOAD_ADAPTER:
            return await self._replicas[names[0]].control(what, argument)
        answers = await asyncio.gather(*(self._replicas[name].control(what, argument) for name in names))
        effects: list[dict[str, int]] = [msgspec.json.decode(answer) for answer in answers]
        return msgspec.json.encode({key: sum(effect[key] for effect in effects) for key in effects[0]})

    async def _of_requests(self, what: str, asked: dict[str, Any]) -> bytes:
        ids = list(map(str, asked["ids"]))
        by_replica: dict[str, list[str]] = {}
        for place in map(self._find, ids):
            if place is not None:
                by_replica.setdefault(place[0], []).append(place[1])
        by_replica = by_replica or {next(iter(self._replicas)): ids}  # which says in words that there is none
        answers = await self._ask([(name, asked | {"ids": own}) for name, own in by_replica.items()], what)
        for each in answers if what == "request" else ():
            for one in each["requests"]:
                _tell_routes(one, self._routes(one["request_id"]))
        return _merged(answers, (_LISTS.get(what, ""),))

    async def _ask(self, chosen: Sequence[tuple[str, dict[str, Any]]], what: str) -> list[dict[str, Any]]:
        """The answers of the replicas that answer, each request under its client's id. Raises if none does."""
        answers = await asyncio.gather(
            *(self._replicas[name].inspect(what, _json(asked)) for name, asked in chosen), return_exceptions=True
        )
        good, refused = [], []
        for (name, _), answer in zip(chosen, answers, strict=True):
            if isinstance(answer, bytes):
                good.append(_translated(msgspec.json.decode(answer), name))
            elif isinstance(answer, QuireError):
                refused.append(answer)
            else:
                raise answer
        if not good:
            raise refused[0]
        return good


def _translated(answer: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the answer with the client's ids, and for each request its replica and how often it has moved."""
    for listed in ("live", "ended", "requests", "sequences"):
        for one in answer.get(listed, ()):
            one["request_id"], _, epoch = one["request_id"].partition(EPOCH)
            one["replica"], one["moves"] = name, int(epoch or 0)
            prefix = one.get("prefix")
            if prefix and prefix["request_id"]:
                bare = prefix["request_id"].partition(EPOCH)[0]
                prefix |= {"request_id": bare, "why": prefix["why"].replace(prefix["request_id"], bare)}
            for taker in one.get("took_blocks", ()):
                bare = taker["request_id"].partition(EPOCH)[0]
                one["why"] = one["why"].replace(taker["request_id"], bare)
                taker["request_id"] = bare
    return answer


def _tell_routes(explained: dict[str, Any], routes: Sequence[RouteTaken]) -> None:
    """Add where a request was sent and why; in words too, where it lost a replica or its first output came late."""
    explained["routes"] = [route.plain() for route in routes]
    words = []
    if len(routes) > 1:
        words.append(f"it was given to {len(routes)} replicas, last to {routes[-1]}")
    for route in routes:
        if route.is_slow:
            words.append(
                f"its first output from replica {route.replica} came after {route.seen:.1f} s,"
                f" {route.predicted:.1f} s were predicted ({route.why})"
            )
    if words:
        explained["why"] = f"{explained['why'].rstrip('.')}; {'; '.join(words)}."


def _merged(answers: Sequence[dict[str, Any]], lists: Sequence[str]) -> bytes:
    merged = answers[0]
    for answer in answers[1:]:
        for each in lists:
            merged[each] += answer[each]
        if "num_live" in answer:
            merged["num_live"] += answer["num_live"]
    return msgspec.json.encode(merged)


def _json(asked: dict[str, Any]) -> str:
    return msgspec.json.encode(asked).decode()
