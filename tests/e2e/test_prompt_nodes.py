"""`quire engine --role`: prompts on one node, answers on another, and no client sees what happens in between."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from e2e.served import Served
from replicas.__main__ import FLAGS, cpu_variant
from replicas.prompts import LEASE_SECONDS, Apart, Stream, Trouble, asked, differences, streams

pytestmark = pytest.mark.e2e

NUM_STREAMS = 24


@pytest.fixture(scope="module")
def expected() -> tuple[list[Stream], tuple[str, ...]]:
    """What the streams are with one engine, and the flags for the same bits."""
    with Served(*FLAGS[2:]) as server:
        return asyncio.run(streams(server.url, NUM_STREAMS, nothing)), cpu_variant(server)


async def nothing(_: object) -> None:
    pass


@pytest.fixture(scope="module")
def apart(expected: tuple[list[Stream], tuple[str, ...]]) -> Iterator[Apart]:
    with ExitStack() as stack:
        yield Apart(stack, expected[1])


def test_prompts_are_computed_on_one_node_and_answered_on_another(
    apart: Apart, expected: tuple[list[Stream], tuple[str, ...]]
) -> None:
    body = {name: value for name, value in asked(0).items() if not name.startswith("stream")}
    with httpx.Client(base_url=apart.front.url, timeout=120) as http:
        reply = http.post("/v1/completions", json=body, headers={"x-request-id": "one"}).raise_for_status().json()
        assert reply["choices"][0]["token_ids"] == expected[0][0].token_ids[0]
        size = 16
        most = (len(body["prompt"]) - 1) // size * size
        assert 0 < reply["usage"]["prompt_tokens_details"]["cached_tokens"] <= most
        (found,) = http.get("/debug/requests/one").json()["requests"]
    assert found["replica"] == apart.answers.address
    assert "transfer" in {part["reason"] for part in found["spent"]}
    got = asyncio.run(streams(apart.front.url, NUM_STREAMS, nothing))
    assert not differences(expected[0], got)
    assert apart.front.metric("quire_kv_sources_total", kind="prefill") > 0
    assert apart.passed("received") > 0
    assert apart.leased_for() <= LEASE_SECONDS


@pytest.mark.parametrize("event", ["prompts_killed", "answers_killed", "byte_flipped", "slow_wire"])
def test_whatever_happens_the_tokens_are_those_of_one_engine(
    apart: Apart, expected: tuple[list[Stream], tuple[str, ...]], event: str
) -> None:
    got = asyncio.run(streams(apart.front.url, NUM_STREAMS, getattr(Trouble(apart), event)))
    assert not differences(expected[0], got)
    assert apart.leased_for() <= LEASE_SECONDS
    apart.ready()
