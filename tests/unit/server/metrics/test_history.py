"""What the dashboard and the gauges over a minute are made of: windows, static batches, Little's law, alerts."""

from __future__ import annotations

import json

import pytest

from quire_engine.contract.types import EngineStats, TenantStats
from quire_server.engine.replicas import ReplicaRow
from quire_server.metrics import metrics as module
from quire_server.metrics.history import SECONDS
from quire_server.metrics.metrics import Metrics
from quire_server.metrics.request_record import RequestRecord
from quire_server.metrics.samples import quantile
from quire_server.metrics.step_metrics import MOST_STEPS
from support.exposition import PLAN, Scrape, busy, timing


class Clock:
    now = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(module.time, "time", lambda: 1e9 + clock.now)
    return clock


@pytest.fixture
def metrics(clock: Clock) -> Metrics:
    made = Metrics("tiny")
    made.observe_plan(PLAN)
    made.tick()
    return made


def run(metrics: Metrics, clock: Clock, lengths: list[int], step: float = 0.01) -> None:
    """Requests that come together and get a token each in every step until they have enough."""
    records = [metrics.start(prompt_tokens=1, max_tokens=length, n=1) for length in lengths]
    for number in range(max(lengths)):
        clock.now += step
        for record, length in zip(records, lengths, strict=True):
            if number < length:
                record.tokens(0, 1, clock.now)
            if number == length - 1:
                record.finish("length")


def second(metrics: Metrics, clock: Clock) -> dict:
    clock.now += 1
    return json.loads(metrics.tick())


def test_guesses_of_a_second_and_why_there_were_none(metrics: Metrics, clock: Clock) -> None:
    frame = second(metrics, clock)["frame"]
    assert (frame["guessed"], frame["guessed_right"], frame["undrafted"]) == (0, 0, None)
    metrics.observe_step(busy(total_draft_tokens=9, total_accepted_tokens=6, total_undrafted={"cost": 2, "turn": 1}))
    frame = second(metrics, clock)["frame"]
    assert (frame["guessed"], frame["guessed_right"], frame["undrafted"]) == (9, 6, "cost")
    metrics.observe_step(busy(total_draft_tokens=9, total_accepted_tokens=6, total_undrafted={"cost": 2, "turn": 5}))
    frame = second(metrics, clock)["frame"]
    assert (frame["guessed"], frame["guessed_right"], frame["undrafted"]) == (0, 0, "turn")


def test_what_static_batching_would_reserve(metrics: Metrics, clock: Clock) -> None:
    """The reference's own example: four sequences of these lengths fill 46.875 % of their batch."""
    run(metrics, clock, [32, 128, 64, 256])
    frame = second(metrics, clock)["frame"]
    assert frame["static_efficiency"] == 0.4688
    scrape = Scrape(metrics)
    assert scrape("quire_static_batching_slots_total", use="useful") == 480
    assert scrape("quire_static_batching_slots_total", use="padding") == 1024 - 480
    assert scrape("quire_batching_efficiency_ratio", batching="static") == 0.46875
    assert scrape("quire_batching_padding_ratio", batching="static") == 0.53125
    assert scrape("quire_batching_efficiency_ratio", batching="continuous") == 1
    for _ in range(61):
        frame = second(metrics, clock)["frame"]
    assert frame["static_efficiency"] is None
    assert Scrape(metrics)("quire_batching_efficiency_ratio", batching="static") == 1


def test_batches_are_of_requests_that_overlap_and_no_larger_than_the_engines(metrics: Metrics, clock: Clock) -> None:
    useful = reserved = 0
    for lengths in ([10, 20], [5]):  # one after the other: two batches
        run(metrics, clock, lengths)
        useful += sum(lengths)
        reserved += len(lengths) * max(lengths)
    many = [1] * 63 + [8, 3]  # the 65th does not fit the first batch of 64
    run(metrics, clock, many)
    useful, reserved = useful + sum(many), reserved + 64 * 8 + 3
    scrape = Scrape(metrics)
    assert scrape("quire_static_batching_slots_total", use="useful") == useful
    assert scrape("quire_static_batching_slots_total", use="padding") == reserved - useful


def test_blocks_that_static_slots_would_hold(metrics: Metrics, clock: Clock) -> None:
    """Four sequences of up to 256 tokens, 16 a block: 64 blocks until the last of them ends."""
    records = [metrics.start(prompt_tokens=8, max_tokens=length - 8, n=1) for length in (32, 128, 64, 256)]
    metrics.observe_step(busy(running=4, blocks_used=7))
    metrics.observe_step(busy(running=1, blocks_used=2))
    told = second(metrics, clock)["frame"]["blocks"]
    assert (told["static_longest"], told["used"], told["peak"]) == (64, 2, 7)
    assert told["static_full"] == PLAN.scheduler.max_model_len // 16
    for record in records[:3]:
        record.finish("length")
    assert second(metrics, clock)["frame"]["blocks"]["static_longest"] == 64
    later = metrics.start(prompt_tokens=8, max_tokens=248, n=1)  # would wait for the batch, were that full
    assert second(metrics, clock)["frame"]["blocks"]["static_longest"] == 80
    later.finish("abort")
    records[3].finish("abort")
    told = second(metrics, clock)["frame"]["blocks"]
    assert (told["static_longest"], told["peak"]) == (0, 2)
    scrape = Scrape(metrics)
    assert scrape("quire_kv_blocks_peak") == 7
    assert scrape("quire_kv_static_blocks", slots="longest") == 0
    assert scrape("quire_kv_static_blocks", slots="max_model_len") == PLAN.scheduler.max_model_len // 16


def test_rows_that_fill_up_a_step_are_padding(metrics: Metrics, clock: Clock) -> None:
    metrics.observe_step(busy(prefill_tokens=0, decode_tokens=3, total_padding_rows=1))
    second(metrics, clock)
    scrape = Scrape(metrics)
    assert scrape("quire_engine_padding_rows_total") == 1
    assert scrape("quire_batching_efficiency_ratio", batching="continuous") == 0.75
    assert scrape("quire_batching_padding_ratio", batching="continuous") == 0.25


def test_the_busy_share_is_of_ten_seconds_and_a_mean_of_the_engines(metrics: Metrics, clock: Clock) -> None:
    for ended in range(1, 21):
        metrics.observe_step(busy(total_busy_seconds=0.75 * ended))
        assert second(metrics, clock)["frame"]["busy"] == 0.75
    scrape = Scrape(metrics)
    assert scrape("quire_engine_busy_ratio") == 0.75
    assert scrape("quire_engine_busy_seconds_total") == 15.0
    metrics.history.num_engines = lambda: 3
    for ended in range(1, 6):
        metrics.observe_step(busy(total_busy_seconds=15.0 + 1.5 * ended))
        assert second(metrics, clock)["frame"]["busy"] == 0.5
    assert Scrape(metrics)("quire_engine_busy_ratio") == pytest.approx((5 * 0.75 + 5 * 1.5) / (5 * 1 + 5 * 3))
    for _ in range(10):
        assert second(metrics, clock)["frame"]["busy"] == 0.0
    assert Scrape(metrics)("quire_engine_busy_ratio") == 0.0
    metrics.observe_step(busy(total_busy_seconds=22.5 + 300.0))  # a step of five minutes has ended
    assert second(metrics, clock)["frame"]["busy"] == 1.0


@pytest.mark.parametrize("lost", [False, True], ids=["counted", "one end is never told"])
def test_littles_law_holds_when_every_end_is_told(metrics: Metrics, clock: Clock, lost: bool) -> None:
    """One sequence a second stays for three: three are in the system, unless a record is forgotten."""
    inside: list[RequestRecord] = []
    taken = 0
    for number in range(90):
        clock.now += 1
        inside.append(metrics.start(prompt_tokens=1, max_tokens=4, n=1))
        taken += 1
        if len(inside) == 4:
            if lost and number % 2:
                inside.pop(0)
            else:
                inside.pop(0).finish("length")
                taken -= 1
        metrics.occupied(clock.now, taken)
        metrics.tick()
    scrape = Scrape(metrics)
    assert scrape("quire_sequence_arrivals_per_second") == pytest.approx(1.0)
    assert scrape("quire_sequence_seconds_in_system") == pytest.approx(3.0)
    residual = scrape("quire_littles_law_residual_ratio")
    if lost:
        assert residual > 0.5, "places stay taken"
    else:
        assert abs(residual) < 0.05
        assert scrape("quire_sequences_in_system") == pytest.approx(3.0)


def test_waiting_for_blocks_is_seen_while_it_lasts(metrics: Metrics, clock: Clock) -> None:
    metrics.observe_step(busy(kv_waiting_since=clock.now - 4, total_kv_wait_seconds=4.0))
    clock.now += 2
    scrape = Scrape(metrics)
    assert scrape("quire_kv_waiting_seconds") == 6
    assert scrape("quire_kv_waiting_time_seconds_total") == 4
    assert second(metrics, clock)["frame"]["kv_waited"] == 7
    metrics.observe_step(busy(total_kv_wait_seconds=7.5))
    scrape = Scrape(metrics)
    assert scrape("quire_kv_waiting_seconds") == 0
    assert scrape("quire_kv_waiting_time_seconds_total") == 7.5


def test_latencies_are_those_of_the_last_ten_seconds(metrics: Metrics, clock: Clock) -> None:
    record = metrics.start(prompt_tokens=1, max_tokens=3, n=1)
    clock.now += 2
    record.tokens(0, 1, clock.now)
    for _ in range(2):
        clock.now += 0.04
        record.tokens(0, 1, clock.now)
    frame = second(metrics, clock)["frame"]
    assert 1.0 < frame["ttft"][0] <= 2.5
    assert 0.025 < frame["itl"][0] <= 0.05
    for _ in range(11):
        frame = second(metrics, clock)["frame"]
    assert frame["ttft"] is frame["itl"] is None


def test_quantiles_are_prometheus_own() -> None:
    assert quantile((1.0, 2.0, 4.0), [0, 10, 0, 0], 0.5) == 1.5
    assert quantile((1.0, 2.0, 4.0), [10, 0, 10, 0], 0.95) == pytest.approx(3.8)
    assert quantile((1.0, 2.0, 4.0), [0, 0, 0, 3], 0.5) == 4.0
    assert quantile((1.0, 2.0), [0, 0, 0], 0.5) is None


def test_the_board_has_live_and_ended_requests(metrics: Metrics, clock: Clock) -> None:
    waiting = metrics.start(prompt_tokens=7, max_tokens=4, n=1, request_id="w")
    running = metrics.start(prompt_tokens=9, max_tokens=4, n=1, request_id="r")
    running.timing(timing(queue_seconds=0.5, kv_wait_seconds=0.25, prefill_seconds=1.5))
    clock.now += 2
    running.tokens(0, 1, clock.now)
    rows = {row["id"]: row for row in second(metrics, clock)["requests"]}
    assert (rows["w"]["state"], rows["w"]["waited"], rows["w"]["prompt_tokens"]) == ("waiting", 3, 7)
    assert (rows["r"]["state"], rows["r"]["queue"], rows["r"]["prefill"], rows["r"]["decode"]) == (
        *("running", 0.5, 1.5),
        1,
    )
    running.finish("length")
    waiting.finish("abort")
    news = second(metrics, clock)
    assert news["num_live"] == 0
    assert [(row["id"], row["state"], row["decode"]) for row in news["requests"]] == [
        ("w", "abort", 0),
        ("r", "length", 0),
    ]


def test_ten_minutes_are_kept_and_no_more(metrics: Metrics, clock: Clock) -> None:
    """After twenty minutes under load the memory is what it was after ten minutes, and the newest is there."""
    sizes = []
    for number in range(2 * SECONDS):
        for _ in range(30):
            metrics.observe_step(busy())
        metrics.start(prompt_tokens=5, max_tokens=2, n=1, request_id=f"{number:032x}").finish("abort")
        news = json.loads(metrics.tick())
        clock.now += 1
        if number % SECONDS == SECONDS - 1:
            sizes.append(len(metrics.history.past()))
    assert max(sizes) < 1.2 * min(sizes) < 1 << 20
    past = json.loads(metrics.history.past())
    assert len(past["frames"]) == SECONDS
    assert past["frames"][-1] == news["frame"]
    assert past["frames"][-1]["t"] - past["frames"][0]["t"] == SECONDS - 1
    assert len(news["requests"]) <= 88
    assert sum(bar[3] for bar in news["bars"]) == 30
    assert len(past["bars"]) == 30
    for _ in range(10_000):
        metrics.observe_step(busy())
    bars = json.loads(metrics.tick())["bars"]
    assert (len(bars), sum(bar[3] for bar in bars)) == (20, MOST_STEPS), "nobody ticks: steps are dropped"


def test_alerts_fire_after_their_time(metrics: Metrics, clock: Clock) -> None:
    """The mean of half a minute has to be above the threshold for that time: a moment's dip changes nothing."""
    states = []
    for number in range(180):
        metrics.observe_step(busy(blocks_used=60 if number % 20 else 50))
        alerts = {alert["name"]: alert["firing"] for alert in second(metrics, clock)["alerts"]}
        states.append(tuple(alerts.get(name) for name in ("QuireKVCacheFull", "QuireKVCacheNearlyFull")))
    assert states[8] == (None, None)
    assert states[50] == (False, False)
    assert states[70] == (True, False)
    assert states[-1] == (True, True)
    metrics.observe_step(EngineStats(blocks_total=64, blocks_free=64))
    for _ in range(5):
        second(metrics, clock)
    assert second(metrics, clock)["alerts"] == []
    metrics.engine_restarted()
    news = second(metrics, clock)
    assert [(alert["name"], alert["firing"]) for alert in news["alerts"]] == [("QuireEngineRestarted", True)]
    assert "1 times" in news["alerts"][0]["summary"]


def test_waiting_for_memory_is_an_alert(metrics: Metrics, clock: Clock) -> None:
    fired = []
    for number in range(150):
        metrics.observe_step(busy(blocks_used=10, total_kv_wait_seconds=0.8 * number))
        fired.append([alert["firing"] for alert in second(metrics, clock)["alerts"]])
    assert fired[-1] == [True]
    assert fired[30] == [False]


def test_replicas_are_told_with_their_routes(metrics: Metrics, clock: Clock) -> None:
    assert second(metrics, clock)["replicas"] is None
    common = {"prompt_tokens_ahead": 5, "restarts": 0, "numerics": "", "pid": None}
    rows = [
        ReplicaRow(name="0", state="ready", draining=False, streams=3, **common),
        ReplicaRow(name="1", state="ready", draining=True, streams=0, **common),
        ReplicaRow(name="2", state="restarting", draining=False, streams=0, **common),
    ]
    metrics.history.replicas = lambda: metrics.replicas.board(rows)
    for why in ("load", "load", "cached"):
        metrics.replicas.decided(why)
    metrics.replicas.moved()
    for _ in range(200):
        metrics.replicas.answered("0", 0.5, 1.5)
    metrics.replicas.answered("gone", 9.0, 9.0)
    board = second(metrics, clock)["replicas"]
    assert (board["routes"], board["moved"]) == ({"load": 2, "cached": 1}, 1)
    assert [(one["name"], one["state"], one["streams"]) for one in board["rows"]] == [
        ("0", "ready", 3),
        ("1", "draining", 0),
        ("2", "away", 0),
    ]
    assert (board["rows"][0]["predicted"], board["rows"][0]["seen"]) == (0.5, 1.5)
    assert board["rows"][1]["seen"] is None


def test_sharing_and_tenants_are_told(metrics: Metrics, clock: Clock) -> None:
    tenants = (TenantStats(tenant="a", running=2, total_service=30.0), TenantStats(tenant="b", waiting=1))
    metrics.observe_step(busy(blocks_shared=5, blocks_unshared=11, blocks_saved=40, tenants=tenants))
    frame = second(metrics, clock)["frame"]
    told = frame["blocks"]
    assert (told["shared"], told["unshared"], told["saved"], told["used"]) == (5, 11, 40, 16)
    assert [(one["name"], one["running"], one["waiting"], one["service"]) for one in frame["tenants"]] == [
        ("a", 2, 0, 30.0),
        ("b", 0, 1, 0.0),
    ]
