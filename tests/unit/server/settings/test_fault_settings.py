"""Faults for tests: how they are written, where they are refused, in which start each of them comes."""

from __future__ import annotations

import dataclasses
import json

import pytest

from quire_engine.contract.config import EngineConfig, Fault, engine_config, faults_of_start
from quire_server.flags import parse_flags
from quire_server.settings import SettingsError


def refusal(*argv: str) -> str:
    with pytest.raises(SettingsError) as caught:
        parse_flags(argv)
    return str(caught.value)


def test_faults_are_read_as_they_are_written():
    wanted = (Fault(point="step.raise", nth=5), Fault(point="oom", seed=-7), Fault(point="start.hang"))
    assert parse_flags(["--set", "enable_fault_injection=step.raise@5, oom@seed=-7,start.hang"]).faults == wanted
    assert parse_flags([]).faults == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("step.rise", "'step.rise' is no fault; expected POINT, POINT@N or POINT@seed=N of step.raise, "),
        ("oom@0", "'oom@0' is no fault"),
        ("oom@x", "'oom@x' is no fault"),
        ("start.fail@seed=3", "start.fail cannot be tied to a seed"),
    ],
)
def test_a_fault_that_there_is_not_is_refused(text: str, said: str):
    assert said in refusal("--set", f"enable_fault_injection={text}")


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "example.org"])
def test_faults_are_for_this_machine_alone(host: str):
    assert "set --host 127.0.0.1" in refusal("--set", "enable_fault_injection=oom", "--host", host)


@pytest.mark.parametrize("where", [["--host", "localhost"], ["--host", "::1"], ["--host", "0.0.0.0", "--uds", "/s"]])
def test_faults_may_be_had_where_only_this_machine_comes(where: list[str]):
    assert parse_flags(["--set", "enable_fault_injection=oom", *where]).faults == (Fault(point="oom"),)


def test_a_fault_that_comes_once_comes_in_one_start_only():
    faults = (Fault(point="oom", nth=2), Fault(point="oom", seed=3), Fault(point="start.fail", nth=2))
    assert faults_of_start(faults, 1) == faults[:2]
    assert faults_of_start(faults, 2) == (faults[1], Fault(point="start.fail"))
    assert faults_of_start(faults, 3) == (faults[1],)


def test_a_configuration_with_faults_comes_back_from_json():
    config = EngineConfig(model="m", faults=(Fault(point="oom", nth=2), Fault(point="step.nan", seed=1)))
    assert engine_config(json.loads(json.dumps(dataclasses.asdict(config)))) == config
