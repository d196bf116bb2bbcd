"""The adapters of a model whose engine may be absent: read beside it, under names that no other model has."""

from __future__ import annotations

import asyncio

import pytest

from quire_engine.contract.errors import EngineDead, ModelLoadError, QuireError
from quire_engine.contract.types import AdapterFacts
from quire_server.engine.adapters import ServedAdapters
from quire_server.errors import BadRequest, NotReady, Unsupported


async def no_engine(_what: str, _argument: str) -> bytes:
    raise EngineDead("no engine is there to be asked")


def absent(error: QuireError | None = None, others: set[str] | None = None) -> ServedAdapters:
    """Of a model without an engine; a read gives `error`, or a digest made of the directory."""

    async def read(path: str) -> AdapterFacts:
        await asyncio.sleep(0)
        if error is not None:
            raise error
        if others is not None:
            others.add("late")
        return AdapterFacts(digest=path.strip("/") * 4, rank=4)

    adapters = ServedAdapters(no_engine, taken=("base",), read=read)
    if others is not None:
        adapters.is_taken = others.__contains__
    return adapters


def test_an_adapter_is_read_without_an_engine_and_forgotten_without_one():
    async def body() -> None:
        adapters = absent()
        served = await adapters.load("sql", "/ab", parent="base")
        assert (served.adapter.digest, served.rank, served.parent) == ("abababab", 4, "base")
        assert adapters.bound("sql") == served.adapter
        assert adapters.bound("base") is None
        await adapters.unload("sql")
        assert "sql" not in adapters

    asyncio.run(body())


def test_a_name_of_another_model_is_refused_also_when_it_was_given_during_the_read():
    async def body() -> None:
        adapters = absent(others={"other"})
        for name in ("other", "late"):
            with pytest.raises(BadRequest, match="is another model's"):
                await adapters.load(name, "/ab")
        assert not list(adapters)

    asyncio.run(body())


def test_what_cannot_be_read_is_a_bad_request_and_a_lost_reader_is_none():
    async def body() -> None:
        with pytest.raises(BadRequest, match="/ab: there is no such directory"):
            await absent(ModelLoadError("/ab: there is no such directory")).load("sql", "/ab")
        with pytest.raises(NotReady):
            await absent(EngineDead("ended early")).load("sql", "/ab")
        with pytest.raises(Unsupported, match="--enable-lora"):
            await ServedAdapters().load("sql", "/ab")

    asyncio.run(body())


@pytest.mark.parametrize("name", ["../x", "a/../b", ".", "a//b", "/a"])
def test_a_name_that_leads_elsewhere_is_refused_before_anything_is_read(name: str):
    async def body() -> None:
        adapters = absent(ModelLoadError("this is not to be read"))
        with pytest.raises(BadRequest, match="only dots") as refused:
            await adapters.load(name, "/ab")
        assert refused.value.param == "lora_name"

    asyncio.run(body())
