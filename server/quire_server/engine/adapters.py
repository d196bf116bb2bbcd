"""The adapters that requests may name, and the orders that load and forget them in the engine.

Promises: a name stands for one digest at a time, and for another only once that is loaded; a request keeps the one that
its name stood for when it was checked.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from quire_engine.contract.config import EngineConfig
from quire_engine.contract.errors import ConfigError, ModelLoadError, QuireError, Unanswerable
from quire_engine.contract.types import FORGET_ADAPTER, LOAD_ADAPTER, Adapter, AdapterFacts
from quire_server.engine.json_child import ask_each
from quire_server.errors import BadRequest, ModelNotFound, NotReady, Unsupported

_START_SECONDS, _READ_SECONDS = 60.0, 120.0  # of the process that reads adapters, and of it for each of them
_LOOK_SECONDS = 0.02  # between two questions whether an adapter is loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAdapter:
    """An adapter by its name."""

    adapter: Adapter
    rank: int
    parent: str  # the name of the model that it adds to; empty: the model's first name
    loaded: float  # seconds since the epoch


class ServedAdapters:
    """The adapters of one model; without `control` there are none, and none can be loaded."""

    def __init__(
        self,
        control: Callable[[str, str], Awaitable[bytes]] | None = None,
        *,
        taken: Sequence[str] = (),
        read: Callable[[str], Awaitable[AdapterFacts]] | None = None,
    ) -> None:
        """`control`: gives an order to the engine; `taken`: the names of the model, the listed one first.

        `read`: of a model whose engine may be absent, what is in a directory; the engine then loads an adapter when a
        request has it. Raises QuireError.
        """
        self._control, self._taken, self._read = control, taken, read
        self.is_taken: Callable[[str], bool] = lambda _: False  # whether another model has the name
        self._served: dict[str, ServedAdapter] = {}
        self._changing = asyncio.Lock()  # one order at a time, so that the last one holds

    def __contains__(self, name: object) -> bool:
        return name in self._served

    def __iter__(self) -> Iterator[str]:
        """The names, in the order in which they were loaded."""
        return iter(tuple(self._served))

    def served(self) -> tuple[tuple[str, Adapter], ...]:
        """All names with their adapters."""
        return tuple((name, each.adapter) for name, each in self._served.items())

    def mirror(self, served: Iterable[tuple[str, Adapter]]) -> None:
        """Replace the served adapters by those that another process has loaded."""
        self._served = {name: ServedAdapter(adapter=adapter, rank=0, parent="", loaded=0.0) for name, adapter in served}

    def find(self, name: str) -> ServedAdapter | None:
        return self._served.get(name)

    def bound(self, name: str | None) -> Adapter | None:
        """The adapter that a request by this name is computed with; None: the model alone. Raises ModelNotFound."""
        if not name or name in self._taken or (not self._served and self._control is None):
            return None
        if name not in self._served:  # it was unloaded a moment ago
            raise ModelNotFound(name, (*self._taken[:1], *self._served))
        return self._served[name].adapter

    async def load(self, name: str, path: str, *, in_place: bool = False, parent: str = "") -> ServedAdapter:
        """Load the adapter in a directory. Raises BadRequest, NotReady."""
        async with self._changing:
            if not {"", ".", ".."}.isdisjoint(name.split("/")):
                raise BadRequest("A part of the name between slashes is empty or only dots.", param="lora_name")
            if name in self._taken:
                raise BadRequest(f"The name '{name}' is the model's own.", param="lora_name")
            self._check_others(name)
            before = self._served.get(name)
            if before is not None and not in_place:
                raise BadRequest(
                    f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set"
                    " 'load_inplace' to True.",
                    param="lora_name",
                )
            facts = await self._loaded(path)
            self._check_others(name)  # it may have been given meanwhile
            served = ServedAdapter(
                adapter=Adapter(name=name, path=path, digest=facts.digest),
                rank=facts.rank,
                parent=parent or ("" if before is None else before.parent),
                loaded=time.time(),
            )
            self._served[name] = served
            if before is not None:
                await self._forget(before.adapter.digest)
            return served

    async def unload(self, name: str) -> None:
        """Forget a name; requests that have its adapter go on. Raises ModelNotFound."""
        async with self._changing:
            served = self._served.pop(name, None)
            if served is None:
                raise ModelNotFound(name, tuple(self._served))
            await self._forget(served.adapter.digest)

    def _check_others(self, name: str) -> None:
        if self.is_taken(name):
            raise BadRequest(f"The name '{name}' is another model's.", param="lora_name")

    async def _loaded(self, path: str) -> AdapterFacts:
        if self._control is None:
            raise _not_enabled()
        if self._read is not None:
            try:
                return await self._read(path)
            except (ModelLoadError, ConfigError) as error:
                raise _unusable(error) from None
            except QuireError as error:
                raise _not_done(error) from None
        order = json.dumps({"order": secrets.token_hex(8), "path": path})
        while True:
            facts = json.loads(await self._tell(LOAD_ADAPTER, order))
            if facts is not None:
                return AdapterFacts(digest=str(facts["digest"]), rank=int(facts["rank"]))
            await asyncio.sleep(_LOOK_SECONDS)

    async def _forget(self, digest: str) -> None:
        """Free its memory soon, unless another name stands for the same files."""
        if any(served.adapter.digest == digest for served in self._served.values()):
            return
        try:
            await self._tell(FORGET_ADAPTER, json.dumps({"digest": digest}))
        except NotReady:
            return  # an engine that starts anew has none

    async def _tell(self, what: str, argument: str) -> bytes:
        if self._control is None:
            raise _not_enabled()
        try:
            return await self._control(what, argument)
        except Unanswerable as error:
            raise _unusable(error) from None
        except QuireError as error:
            raise _not_done(error) from None


def _not_enabled() -> Unsupported:
    return Unsupported("Adapters are not enabled: start the server with --enable-lora.", param="lora_name")


def _unusable(error: QuireError) -> BadRequest:
    return BadRequest(f"The adapter cannot be loaded: {error}.", param="lora_path")


def _not_done(error: QuireError) -> NotReady:
    return NotReady(f"Not done: {error}.", retry_after_seconds=2.0)


class AdapterFiles:
    """Reads adapters of models whose engines may be absent, in a process of its own that ends.

    They are checked against the model as an engine would. One that later gets another adapter from there refuses it.
    """

    def __init__(self) -> None:
        self._ahead: dict[tuple[EngineConfig, str], AdapterFacts] = {}  # read at the start, for one use each

    async def read_ahead(self, wanted: Sequence[tuple[EngineConfig, str]]) -> None:
        """Read all adapters of the settings by one process, which takes two seconds to start. Raises as `read`."""
        if wanted:
            self._ahead = dict(zip(wanted, await asyncio.to_thread(_ask, wanted), strict=True))

    async def read(self, config: EngineConfig, path: str) -> AdapterFacts:
        """An adapter for the model of this configuration. Raises ModelLoadError, ConfigError, EngineDead."""
        known = self._ahead.pop((config, path), None)
        return (await asyncio.to_thread(_ask, [(config, path)]))[0] if known is None else known


def _ask(wanted: Sequence[tuple[EngineConfig, str]]) -> list[AdapterFacts]:
    questions = [{"config": config, "path": path} for config, path in wanted]
    return ask_each("adapter_facts", questions, AdapterFacts, timeout=_START_SECONDS + _READ_SECONDS * len(wanted))
