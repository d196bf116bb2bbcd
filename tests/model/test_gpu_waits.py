"""What a step makes the host wait for: nothing, and it is one copy to the device and one back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from quire_engine.execution.gpu import forward, runner
from quire_engine.execution.gpu.tables import SlotTables
from support.both_runners import Both
from support.model_steps import random_ids
from support.step_stories import ahead


def story(**sampling) -> Both:
    both = Both(seed=21)
    both.story.add(0, random_ids(5, 0), 12, **sampling)
    both.story.add(1, random_ids(7, 1), 12, temperature=0.8, top_k=5, top_p=0.9)
    both.story.add(2, random_ids(40, 2), 8)
    both.story.run()
    return both


def lint(both: Both) -> list[tuple[int, int, int, int]]:
    """Copies to the device, copies back, waits and pageable copies of every launch."""
    device, seen = both.device, []
    for batch, _ in ahead(both.story.steps):
        before = device.sent, device.fetched, len(device.waits), device.pageable
        both.executor.launch(batch)
        after = device.sent, device.fetched, len(device.waits), device.pageable
        seen.append(tuple(b - a for a, b in zip(before, after, strict=True)))
        if len(both.executor._in_flight) == both.executor.max_in_flight:
            both.executor.collect()
    return seen


def test_a_step_is_one_copy_to_the_device_and_nobody_waits():
    both = story()
    assert set(lint(both)) == {(1, 1, 0, 0)}
    assert both.device.replays > 5


def test_log_probabilities_are_one_copy_more_from_the_device():
    assert set(lint(story(num_logprobs=3, num_prompt_logprobs=2))) == {(1, 2, 0, 0)}


def test_only_rows_with_rules_make_a_step_wait():
    assert any(pageable for *_, pageable in lint(story(logit_bias=((3, 1.0),))))


def planted(monkeypatch: pytest.MonkeyPatch, plant: Callable[[torch.Tensor], object]) -> list[tuple[int, ...]]:
    choose = forward.Forward.choose

    def also(self, logits, rows, into):
        plant(logits)
        choose(self, logits, rows, into)

    monkeypatch.setattr(forward.Forward, "choose", also)
    monkeypatch.setattr(runner.GpuRunner, "_graphs", None, raising=False)
    both = story()
    both.runner._graphs.bucket = lambda *_: None  # a capture would refuse it
    return lint(both)


@pytest.mark.parametrize(
    "plant",
    [
        lambda logits: logits[0, 0].item(),
        pytest.param(lambda logits: bool((logits > 0).any()), marks=pytest.mark.matrix),
        pytest.param(lambda logits: logits[0].tolist(), marks=pytest.mark.matrix),
        lambda logits: logits.cpu(),
        pytest.param(lambda logits: logits.nonzero(), marks=pytest.mark.matrix),
        lambda logits: logits[logits > 1e9],
    ],
    ids=["item", "bool", "tolist", "cpu", "nonzero", "mask"],
)
def test_a_wait_is_found(monkeypatch, plant):
    assert all(waits == 1 for *_, waits, _ in planted(monkeypatch, plant))


def test_a_copy_from_pageable_memory_is_found(monkeypatch):
    seen = planted(monkeypatch, lambda logits: torch.tensor([1, 2], device=logits.device))
    assert all(pageable == 1 for *_, pageable in seen)


def test_a_second_copy_is_found(monkeypatch):
    apply = SlotTables.apply

    def twice(self, packed):
        apply(self, packed)
        buffer = both.device.host_buffer(16)
        both.device.send(buffer.tensor, torch.empty(16, dtype=torch.uint8))

    monkeypatch.setattr(SlotTables, "apply", twice)
    both = story()
    assert {sent for sent, *_ in lint(both)} == {2}


def test_a_wait_inside_a_capture_is_refused(monkeypatch):
    choose = forward.Forward.choose

    def also(self, logits, rows, into):
        logits[0, 0].item()
        choose(self, logits, rows, into)

    monkeypatch.setattr(forward.Forward, "choose", also)
    with pytest.raises(AssertionError, match="inside a capture"):
        Both().executor.capture_largest()
