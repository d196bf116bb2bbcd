"""`quire engine --role`: prompts on one node, answers on another, and no client sees what happens in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count

import httpx
import pytest

from e2e.served import Served
from quire_engine.scheduling.kept_prefixes import LONGEST, SHORTEST
from replicas.__main__ import FLAGS, cpu_variant
from replicas.prompts import LEASE_SECONDS, Apart, Stream, Trouble, differences, streams, timed

pytestmark = pytest.mark.e2e

NUM_STREAMS = 16


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
    pause, cached = SHORTEST, 0
    with httpx.Client(base_url=apart.front.url, timeout=120) as http:
        for number in count():  # a busy machine may be late: then its node is left alone for a while
            body = {name: value for name, value in timed(number).items() if not name.startswith("stream")}
            named = {"x-request-id": f"n{number}"}
            reply = http.post("/v1/completions", json=body, headers=named).raise_for_status().json()
            cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
            (found,) = http.get(f"/debug/requests/n{number}").json()["requests"]
            assert found["replica"] == apart.answers.address
            if cached:
                break
            assert pause <= LONGEST, "no block has come in minutes"
            time.sleep(1.1 * pause)
            pause *= 2
    assert cached <= (len(body["prompt"]) - 1) // 16 * 16
    assert "transfer" in {part["reason"] for part in found["spent"]}
    got = asyncio.run(streams(apart.front.url, NUM_STREAMS, nothing))
    assert not differences(expected[0], got)
    assert apart.front.metric("quire_kv_sources_total", kind="prefill") > 0
    assert apart.passed("received") > 0
    assert apart.leased_for() <= LEASE_SECONDS


# A slow wire takes no other way; `make replica-test` has it too.
@pytest.mark.parametrize(
    "event",
    ["prompts_killed", "answers_killed", "byte_flipped", pytest.param("slow_wire", marks=pytest.mark.matrix)],
)
def test_whatever_happens_the_tokens_are_those_of_one_engine(
    apart: Apart, expected: tuple[list[Stream], tuple[str, ...]], event: str
) -> None:
    got = asyncio.run(streams(apart.front.url, NUM_STREAMS, getattr(Trouble(apart), event)))
    assert not differences(expected[0], got)
    assert apart.leased_for() <= LEASE_SECONDS
    apart.ready()
