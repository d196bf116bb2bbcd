"""The soft limit on open files follows from the connections that are allowed, as far as the system lets it."""

from __future__ import annotations

import logging
import resource

import pytest

from quire_server.http.listener import allow_connections

UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("before", "after", "waiting"),
    [
        ((256, 1_000_000), (4_560, 1_000_000), 2_048),
        ((256, UNLIMITED), (4_560, UNLIMITED), 2_048),
        ((256, 3_000), (3_000, 3_000), 488),
        ((8_192, 8_192), None, 2_048),
        ((UNLIMITED, UNLIMITED), None, 2_048),
    ],
)
def test_as_many_as_are_needed(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    before: tuple[int, int],
    after: tuple[int, int] | None,
    waiting: int,
) -> None:
    changed: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: before)
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: changed.append(limits))
    assert allow_connections(1_000) == waiting
    assert changed == ([] if after is None else [after])
    assert not caplog.records


def test_a_hard_limit_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    changed: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (512, 1_024))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: changed.append(limits))
    with caplog.at_level(logging.WARNING):
        assert allow_connections(1_000) == 0
    assert changed == [(1_024, 1_024)]
    assert "1024 open files, and 1000 connections need 2512" in caplog.text


def test_a_system_that_refuses_is_served_with_what_there_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (512, 1_000_000))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    with caplog.at_level(logging.WARNING):
        allow_connections(1_000)
    assert "512 open files, and 1000 connections need 2512" in caplog.text
