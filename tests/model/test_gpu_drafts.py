"""Guessed tokens on a GPU, by the simulated device: the bits that there are without, from graphs of decodes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from model.test_simulated_engine import LIMITS, asked, host, on_a_gpu, requests
from quire_engine.contract.batch import PENDING
from quire_engine.contract.drafts import Draft, Drafter, Wish, most_drafted_rows
from quire_engine.contract.errors import ConfigError
from quire_engine.engine import Engine
from quire_engine.execution.drafting.choice import own_speculation
from quire_engine.execution.drafting.row_costs import measured_rows
from quire_engine.execution.gpu.graphs import Bucket
from quire_engine.execution.gpu.runner import GpuRunner
from quire_engine.scheduling.speculation import Speculation, Waiting
from support.covering import few
from support.offline import generate

CHEAP = dict.fromkeys((1, 64), 0.001)
MOST = most_drafted_rows(LIMITS.max_num_seqs)


class Known:
    """Guesses what the requests get, or something else, or both by turns."""

    is_costly = False

    def __init__(self, kind: str, whole: Sequence[tuple[int, ...]]) -> None:
        self._kind, self._whole, self._dice = kind, whole, random.Random(2)

    def draft(self, wishes: Sequence[Wish]) -> list[Draft]:
        assert all(PENDING not in wish.token_ids for wish in wishes)
        return [self._guess(tuple(wish.token_ids), wish.most) for wish in wishes]

    def _guess(self, known: tuple[int, ...], most: int) -> Draft:
        kind = self._kind if self._kind != "any" else self._dice.choice(("right", "wrong", "outside", "none"))
        if kind in {"wrong", "outside"}:
            return Draft(tuple(self._dice.randrange(512) for _ in range(most)) if kind == "wrong" else (600,) * most, 9)
        found = [whole for whole in self._whole if whole[: len(known)] == known and kind == "right"]
        return Draft(found[0][len(known) : len(known) + most], 9) if found else Draft()

    def note_end(self, token_ids: Sequence[int], scope: str) -> None:
        pass

    def forget(self, sequence_id: int) -> None:
        pass


class Changing(Waiting):
    """Waits for results, or does not, by turns."""

    def __init__(self, *, has_choice: bool) -> None:
        super().__init__(has_choice=has_choice)
        self._dice = random.Random(1)
        self.waits = True

    def learn(self, rate: float) -> None:
        self.waits = not self._has_choice or self._dice.random() < 0.7


def drafter(kind: str) -> Drafter:
    prompts = {wanted.request_id: wanted.prompt_token_ids for wanted in requests()}
    return Known(kind, [(*prompts[name], *each.token_ids) for (name, _), each in host()[1].items()])


def speculating(kind: str, *, ahead: bool) -> Callable[..., Speculation]:
    def speculate(kv: object) -> Speculation:
        found = Speculation(drafter(kind), kv, row_seconds=CHEAP, most_rows=MOST, plans_ahead=ahead)  # type: ignore[arg-type]
        found._waiting = Changing(has_choice=ahead)
        found.learn = lambda *_: found._waiting.learn(0.0)  # type: ignore[method-assign]
        return found

    return speculate


# By turns they are right, wrong, outside the vocabulary and none.
@pytest.mark.parametrize("ahead", few([True, False], True))
@pytest.mark.parametrize(
    "kind", ["any", *(pytest.param(kind, marks=pytest.mark.matrix) for kind in ("right", "wrong"))]
)
def test_clients_see_the_same_with_drafts(monkeypatch, kind, ahead):
    """Greedy, drawn, with log-probabilities, rules and grammars, in several choices; beams; some are preempted."""
    built, right = host()
    gpu, _ = on_a_gpu(monkeypatch, built, ahead=ahead, speculate=speculating(kind, ahead=ahead))
    for key, result in generate(gpu, requests()).items():
        assert replace(result, num_preemptions=0) == replace(right[key], num_preemptions=0), key
    stats = gpu.scheduler.stats()
    assert stats.total_draft_tokens > 50
    if kind in {"right", "any"}:
        assert stats.total_accepted_tokens > 20
    assert stats.blocks_used == 0


def test_rows_with_drafts_are_decodes_of_the_same_graphs(monkeypatch):
    """Each row is a decode of its own with the blocks of its sequence: no other kernel computes it."""
    built, _ = host()
    gpu, device = on_a_gpu(monkeypatch, built, ahead=True, speculate=speculating("wrong", ahead=False))
    runner = gpu.executor._runner
    assert isinstance(runner, GpuRunner)
    wanted = [replace(requests()[i], n=1) for i in (0, 1, 2, 5)]
    seen: list[tuple[int, int]] = []
    issue = runner._issue

    def watched(batch, *arguments, **options):
        before = device.replays + device.captures
        found = issue(batch, *arguments, **options)
        if batch.num_drafts and batch.num_tokens == batch.num_decodes + batch.num_drafts:
            seen.append((batch.num_tokens, device.replays + device.captures - before))
        return found

    monkeypatch.setattr(runner, "_issue", watched)
    generate(gpu, wanted)
    assert len(seen) > 10
    assert all(count == 1 for _, count in seen), "one graph serves a step, or is captured"
    assert max(rows for rows, _ in seen) > LIMITS.max_num_seqs
    assert max(bucket.num_rows for bucket in runner._graphs._captured if isinstance(bucket, Bucket)) <= 40


@pytest.mark.matrix  # graphs of rows with drafts: above
def test_what_rows_cost_is_measured_by_the_same_graphs(monkeypatch):
    built, _ = host()
    gpu, device = on_a_gpu(monkeypatch, built, ahead=True, speculate=speculating("wrong", ahead=True))
    found = measured_rows(gpu.executor.execute, gpu.scheduler._config, MOST, has_graphs=True, clock=lambda: 0.0)
    assert sorted(found) == [1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 18, 19, 24, 25, 30, 31, 36]
    assert MOST == 36
    assert device.captures == 8, "of 1, 2, 4, 8, 16, 24, 32 and 40 rows"
    assert device.replays > 17


def test_a_gpu_waits_for_results_where_more_tokens_pay_for_it():
    """Two tokens a step of 1.5 ms against one of 1 ms; then guesses are wrong, and it plans ahead again."""
    waiting, counted = Waiting(has_choice=True), {True: 0, False: 0}
    for _ in range(500):
        counted[waiting.waits] += 1
        waiting.learn(2 / 1.5e-3 if waiting.waits else 1 / 1e-3)
    assert counted[True] > 380
    counted = {True: 0, False: 0}
    for _ in range(2000):
        counted[waiting.waits] += 1
        waiting.learn(1 / 1.5e-3 if waiting.waits else 1 / 1e-3)
    assert counted[True] < 200
    assert not Waiting(has_choice=True).waits
    alone = Waiting(has_choice=False)
    for _ in range(100):
        alone.learn(1.0)
    assert alone.waits


def test_results_are_needed_while_drafts_are_in_flight(monkeypatch):
    """Also where the scheduler has just chosen to plan ahead: how many tokens the step gives is not known."""
    built, right = host()
    gpu, _ = on_a_gpu(monkeypatch, built, ahead=True, speculate=speculating("right", ahead=True))
    engine, scheduler = Engine(gpu.scheduler, gpu.executor), gpu.scheduler
    engine.submit(requests()[0])
    drafted = 0
    while engine.has_work:
        engine.step()
        if engine._in_flight and engine._in_flight[-1].num_drafts:
            drafted += 1
            scheduler._speculation._waiting.waits = False
            assert scheduler.needs_results
    assert drafted
    assert right["r0", 0].token_ids


def test_what_a_gpu_refuses_is_named():
    cuda = torch.device("cuda")
    plain = asked()
    for name in ("suffix", "outputs"):
        config, line = own_speculation(replace(plain, speculation=name), cuda, has_states=False)
        assert (config.speculation, line) == (name, name)
    config, line = own_speculation(replace(plain, speculation="auto"), cuda, has_states=False)
    assert config.speculation == "off"
    assert line == "off: on a GPU guesses are for who asks for them, as suffix or outputs"
    with pytest.raises(ConfigError, match=r"speculation=model:/x: a draft model is computed on a CPU only.*suffix"):
        own_speculation(replace(plain, speculation="model:/x"), cuda, has_states=False)
    with pytest.raises(ConfigError, match="recurrent state"):
        own_speculation(replace(plain, speculation="suffix"), cuda, has_states=True)
