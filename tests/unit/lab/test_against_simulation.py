"""The table of live against simulated runs: the same percentiles of both, misses marked."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from quire_bench.measures import measure
from quire_bench.records import Record, Run
from quire_bench.traces import TraceRow
from quire_engine.cost_model import CostModel
from quire_lab.against_simulation import lines_of, main, print_lines, with_server
from quire_lab.simulation.report import report
from quire_lab.simulation.setup import Setup
from quire_lab.simulation.simulator import simulate


def live(step: float) -> Run:
    """Three requests, one at a time, whose tokens come every `step` seconds."""
    records = [
        Record(
            **{"due": 10.0 * i, "sent": 10.0 * i, "arrivals": [10.0 * i + step * k for k in range(1, 6)]},
            **{"input_tokens": 8, "asked_tokens": 5, "output_tokens": 5, "ended": 10.0 * i + 5 * step, "outcome": "ok"},
        )
        for i in range(3)
    ]
    return Run(started=0.0, ended=30.0, records=records, in_flight=[])


def test_both_percentiles_and_their_error() -> None:
    rows = [TraceRow(at=10.0 * i, input_tokens=8, output_tokens=5) for i in range(3)]
    simulated = report(simulate(Setup(cost=CostModel(step=0.1)), rows))
    same = list(lines_of("t", 1.0, measure(live(0.1)), simulated))
    assert [(line.quantity, line.statistic) for line in same] == [
        (quantity, statistic) for quantity in ("ttft", "tpot", "e2e") for statistic in ("p50", "p95")
    ]
    assert [line.error for line in same] == pytest.approx([0.0] * 6, abs=1e-9)
    slower = list(lines_of("t", 1.0, measure(live(0.12)), simulated))
    assert [line.error for line in slower] == pytest.approx([-1 / 6] * 6)
    assert [line.ok for line in slower] == [False, True] * 3
    out = StringIO()
    print_lines(slower, Console(file=out, width=120))
    assert out.getvalue().count("MISSED") == 3
    assert "p95 within 20%: 3 of 3" in out.getvalue()


def test_what_requests_alone_take_longer_is_the_servers() -> None:
    # 20 ms to each token, where the engine by itself takes 15 for a prompt and 12 for a decode.
    engine = CostModel(step=0.012, prompt=((1, 0.015), (512, 0.015)))
    served = with_server(engine, measure(live(0.02)))
    assert (served.request, served.step) == pytest.approx((0.005, 0.020))
    assert served.prompt == engine.prompt
    slower = CostModel(step=0.03, prompt=((1, 0.04), (512, 0.04)))
    assert with_server(slower, measure(live(0.02))) == slower


def test_without_a_calibration_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--trace", "t.csv", "--cost", "absent.json"]) == 2
    assert "quire calibrate" in capsys.readouterr().err
