"""The queue that all API servers share, as one of them sees it: full when the main process says so."""

from __future__ import annotations

import asyncio

import pytest

from quire_server.api_servers.frames import Outputs
from quire_server.api_servers.port import MainProcess, SharedClient
from quire_server.metrics.metrics import Metrics
from support.fakes import MODEL, make_plan

pytestmark = pytest.mark.anyio

REASON = 'quire_rejected_total{model_name="fake",reason="max_num_queued_reqs"} '


def shared() -> tuple[MainProcess, SharedClient, Metrics]:
    main, metrics = MainProcess(lambda _: None, count=2), Metrics(MODEL, max_model_len=512)
    return main, SharedClient(main, make_plan(), metrics), metrics


async def test_it_is_full_by_the_counts_of_all_and_only_refusals_are_counted() -> None:
    main, client, metrics = shared()
    assert client.refusal() is None, "nothing was heard yet"
    main.receive(Outputs(taken=47, seats=16, most=48, rate=10.0))
    assert not client.is_full()
    assert client.is_full(lately=0, underway=2)
    main.receive(Outputs(taken=48, seats=16, most=48, rate=10.0))
    assert client.is_full()
    assert f"{REASON}0.0" in metrics.render().decode()
    first, second = client.refusal(), client.refusal()
    assert first is not None
    assert second is not None
    assert int(second.headers["retry-after-ms"]) > int(first.headers["retry-after-ms"]) >= 1000
    assert f"{REASON}2.0" in metrics.render().decode()
    client.close()
    assert not client.is_full()
    assert client.refusal() is None
    await asyncio.sleep(0)
