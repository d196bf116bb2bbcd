"""What a row's grammar and thinking let come next: masks, ends, forced tokens, and every way to fail."""

from __future__ import annotations

import json
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from quire_engine.contract.types import SamplingParams, StopParams, ThinkingParams
from quire_engine.execution.constrained import constraints as constraints_module
from quire_engine.execution.constrained import grammars as grammars_module
from quire_engine.execution.constrained.constraints import Constraints
from quire_engine.execution.constrained.grammars import Grammars
from quire_engine.execution.logit_rules import SampleRow
from support.checkpoints import VOCAB_SIZE, write_tokenizer
from support.model_steps import scheduled

EOS = 2
PADDED = VOCAB_SIZE + 40  # columns of the logits: the tokenizer knows nothing of the last ones


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, 0]}))
    return path


@pytest.fixture(scope="module")
def tokenizer(folder) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def grammars(folder) -> Grammars:
    return Grammars(folder, PADDED)


def row(grammar: str = "", output: tuple[int, ...] = (), *, sequence_id=1, max_tokens=50, stop=(EOS,), **sampling):
    return SampleRow(
        sampling=SamplingParams(grammar=grammar, **sampling),
        stop=StopParams(max_new_tokens=max_tokens, stop_token_ids=stop),
        choice=0,
        prompt_token_ids=(1, 2, 3),
        output_token_ids=output,
        position=3 + len(output),
        logits_row=0,
        sequence_id=sequence_id,
    )


def ids_of(constraints: Constraints, one: SampleRow) -> set[int]:
    found = constraints.allowed([one], PADDED)
    assert not found.errors
    return set(np.flatnonzero(np.unpackbits(found.masks[0].view(np.uint8), bitorder="little")).tolist())


def error_of(constraints: Constraints, one: SampleRow) -> str:
    found = constraints.allowed([one], PADDED)
    assert not found.masks
    return found.errors[0]


def test_a_directory_of_defaults_names_the_ids_that_end_a_text_instead(folder: Path, tmp_path: Path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, 7]}))
    for store, ends in ((Grammars(folder, PADDED), {EOS, 0}), (Grammars(folder, PADDED, defaults=tmp_path), {EOS, 7})):
        store.warm_up()
        assert set(store.end_ids) == ends


def test_only_what_the_grammar_allows_and_an_end_where_it_is_complete(grammars, tokenizer):
    constraints = Constraints(grammars)
    first = ids_of(constraints, row('start: "the" | "quire"'))
    assert {tokenizer.decode([i]) for i in first} <= {"t", "th", "the", "q", "qu", "qui", "quire", "quir"}
    the = tuple(tokenizer.encode("the").ids)
    assert ids_of(constraints, row('start: "the" | "quire"', the)) == {EOS}
    assert ids_of(constraints, row('start: "the" | "quire"', the, stop=(EOS, 0, 7))) == {EOS, 0, 7}
    assert ids_of(constraints, row('start: "the" | "quire"', the, stop=(7,))) == {7}, "an end is what ends the request"


def test_ids_that_the_tokenizer_does_not_know_never_come(grammars):
    allowed = ids_of(Constraints(grammars), row(r"start: /(.|\n)*/"))
    assert max(allowed) < VOCAB_SIZE
    assert len(allowed) > 200
    assert {0, 1} & allowed == set(), "special tokens are no text"


def test_min_tokens_hold_the_end_back_unless_nothing_else_may_come(grammars, tokenizer):
    constraints = Constraints(grammars)
    dog = tuple(tokenizer.encode("dog").ids)
    assert EOS in ids_of(constraints, row("start: /[dog]*/", dog))
    assert EOS not in ids_of(constraints, row("start: /[dog]*/", dog, min_tokens=9))
    assert ids_of(constraints, row('start: "dog"', dog, min_tokens=9)) == {EOS}


def test_masks_follow_from_the_tokens_alone(grammars, tokenizer):
    """Step by step, at once, after others, after the follower of another output of the same sequence."""
    grammar = 'start: "{" ("\\"" /[a-z]{1,9}/ "\\":" /[0-9]{1,3}/ ","?)* "}"'
    output = tuple(tokenizer.encode('{"quick":12,"dog":7}').ids)
    stepping, jumping = Constraints(grammars), Constraints(grammars)
    for length in range(len(output) + 1):
        wanted = ids_of(Constraints(grammars), row(grammar, output[:length]))
        assert ids_of(stepping, row(grammar, output[:length])) == wanted
        ids_of(jumping, row(grammar, output[: (7 * length) % len(output)]))
        assert ids_of(jumping, row(grammar, output[:length])) == wanted
        ids_of(stepping, row('start: "x"', sequence_id=2 + length))


def test_rows_behind_drafts_have_masks_of_their_own_and_change_no_other(grammars, tokenizer):
    grammar = 'start: "{" ("\\"" /[a-z]{1,9}/ "\\":" /[0-9]{1,3}/ ","?)* "}"'
    output = tuple(tokenizer.encode('{"quick":12,"dog":7}').ids)
    constraints, lone = Constraints(grammars), Constraints(grammars)
    for at in range(1, len(output) - 2):
        plain = row(grammar, output[:at])
        for drafts in (output[at : at + 3], (EOS, *output[at : at + 2])):  # right ones, and one that may not come
            rows = [plain.behind(drafts[:count]) for count in range(len(drafts) + 1)]
            found = constraints.allowed(rows, PADDED)
            masks = {i: mask.tolist() for i, mask in found.masks.items()}
            assert sorted(masks) == ([0] if drafts[0] == EOS else [0, 1, 2, 3])
            assert sorted(masks.keys() | found.errors.keys()) == [0, 1, 2, 3]
            for count, mask in masks.items():
                assert mask == lone.allowed([row(grammar, output[:at] + drafts[:count])], PADDED).masks[0].tolist()
        assert len(constraints._followers) == 1


def test_drafts_that_a_grammar_forbids_are_counted_out(grammars, tokenizer):
    constraints, (a, b, digit) = Constraints(grammars), [tokenizer.encode(text).ids[0] for text in "ab7"]
    item = replace(
        scheduled([1, 2, 3, a, b, a, digit], [0], 3, 4, all_logits=False),
        prompt_token_ids=(1, 2, 3),
        output_token_ids=(a,),
        num_drafts=3,
    )
    for grammar, wanted in (("start: /[a-z]+/", 2), ("start: /a[0-9]+/", 0), ("start: /[a-z0-9]+/", 3), ("", 3)):
        assert constraints.possible(replace(item, sampling=SamplingParams(grammar=grammar))) == wanted
        constraints = Constraints(grammars)


def test_a_step_with_many_sequences_keeps_a_follower_for_each(grammars, monkeypatch):
    monkeypatch.setattr(constraints_module, "_SPARE_FOLLOWERS", 2)
    constraints = Constraints(grammars)
    rows = [row("start: /[a-z]+/", sequence_id=i) for i in range(9)]
    constraints.allowed(rows, PADDED)
    assert len(constraints._followers) == 9
    constraints.allowed(rows[:3], PADDED)
    assert [key[0] for key in constraints._followers] == [7, 8, 0, 1, 2]


def test_tokens_that_must_come_come_at_once(grammars, tokenizer):
    grammar = 'start: /[0-9]/ " the capital of France is Paris"'
    constraints = Constraints(grammars, max_forced=40)
    (seven,) = tokenizer.encode("7").ids
    one = row(grammar)
    ids_of(constraints, one)
    forced = constraints.forced(one, seven)
    assert tokenizer.decode([seven, *forced]) == "7 the capital of France is Paris"
    assert forced[-1] == EOS
    for length in range(len(forced)):
        assert ids_of(Constraints(grammars), row(grammar, (seven, *forced[:length]))) == {forced[length]}
    short = Constraints(grammars, max_forced=3)
    assert short.forced(one, seven) == forced[:3]
    assert Constraints(grammars, max_forced=40).forced(row(grammar, max_tokens=3), seven) == forced[:2]
    assert constraints.forced(row(grammar, num_logprobs=0), seven) == ()
    assert constraints.forced(row(grammar, banned_token_ids=(5,)), seven) == ()
    assert constraints.forced(one, EOS) == ()


def test_a_budget_of_thinking_is_kept_with_and_without_a_grammar(grammars):
    thinking = ThinkingParams(end_ids=(1,), is_open=True, max_tokens=2)
    constraints = Constraints(grammars)
    assert constraints.allowed([row(thinking=thinking)], PADDED).masks == {}
    assert ids_of(constraints, row(output=(50, 51), thinking=thinking)) == {1}
    assert constraints.allowed([row(output=(50, 51, 1), thinking=thinking)], PADDED).masks == {}
    assert Constraints(grammars).forced(row(output=(50,), thinking=thinking), 51) == (1,)
    grammar = r'start: /(.|\n)*/ <[1]> "yes"'
    assert len(ids_of(constraints, row(grammar, (50,), thinking=thinking))) > 200
    assert ids_of(constraints, row(grammar, (50, 51), thinking=thinking)) == {1}
    refused = row('start: "quick brown fox"', thinking=ThinkingParams(end_ids=(1,), is_open=True, max_tokens=0))
    assert "thinking" in error_of(constraints, refused)


def test_whatever_fails_is_an_error_and_never_free(grammars, folder, tmp_path):
    constraints = Constraints(grammars)
    assert "unknown name" in error_of(constraints, row("start: nothing"))
    assert "not accepted" in error_of(constraints, row("gibberish ((("))
    assert "doesn't satisfy the grammar" in error_of(constraints, row('start: "the"', (300, 301, 302)))
    assert error_of(Constraints(None), row('start: "the"')) == "this engine follows no grammars"
    assert "tokenizer.json" in error_of(Constraints(Grammars(tmp_path, PADDED)), row('start: "the"'))
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "tokenizer.json" in error_of(Constraints(Grammars(tmp_path, PADDED)), row('start: "the"'))
    shutil.copy(folder / "tokenizer.json", tmp_path)
    assert "vocab" in error_of(Constraints(Grammars(tmp_path, 100)), row('start: "the"'))


BOMBS = {
    "repetitions of repetitions": "start: /((a{1,30}){1,30}){1,30}/",
    "thousands of optional letters": "start: " + " ".join(f'"{chr(97 + i % 26)}"?' for i in range(2000)),
    "as many lexer states as there are": "start: (w)+\nw: "
    + " | ".join(f"/[a-z]*{chr(97 + i % 26)}[a-z]{{{i % 13}}}/" for i in range(60)),
    "ambiguous": 'start: a\na: a a | "x" | ',
    "deep": "start: " + "(" * 300 + '"a"' + ")*" * 300,
    "a wide choice of objects": "start: %json "
    + json.dumps({"anyOf": [{"properties": {f"k{i}_{j}": {"type": "string"} for j in range(10)}} for i in range(100)]}),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_costs_little_and_then_fails_or_goes_on_within_its_grammar(grammars, name):
    """The library's own counters end it; twenty seconds are what no slow machine needs for one of these steps."""
    constraints, output = Constraints(grammars), ()
    dice = np.random.default_rng(1)
    for _ in range(40):
        one = row(BOMBS[name], output)
        started = time.process_time()
        found = constraints.allowed([one], PADDED)
        assert time.process_time() - started < 20
        if found.errors:
            assert "grammar" in found.errors[0]
            assert not found.masks
            return
        allowed = np.flatnonzero(np.unpackbits(found.masks[0].view(np.uint8), bitorder="little"))
        assert len(allowed)
        output = (*output, int(dice.choice(allowed)))
        if output[-1] == EOS:
            return


def test_grammars_are_compiled_in_a_thread_once_each(folder, monkeypatch):
    store = Grammars(folder, PADDED)
    compiled = []
    real = grammars_module.LLMatcher

    def compile_one(vocabulary, text, **options):
        compiled.append((text, threading.current_thread().name))
        return real(vocabulary, text, **options)

    monkeypatch.setattr(grammars_module, "LLMatcher", compile_one)
    for text in ('start: "a"', 'start: "b"', 'start: "a"', "start: nothing"):
        store.prepare(text, "")
    deadline = time.monotonic() + 300
    while not all(store.prepare(text, "") for text in ('start: "a"', 'start: "b"', "start: nothing")):
        store.wait(0.1)
        assert time.monotonic() < deadline
    assert sorted(compiled) == [('start: "a"', "grammars"), ('start: "b"', "grammars"), ("start: nothing", "grammars")]
    assert store.error('start: "a"') is None
    assert "unknown name" in str(store.error("start: nothing"))
    store.matcher('start: "a"')
    assert len(compiled) == 3
    for scope in ("one", "two", "one", "two"):  # the time of a compilation tells neither of the other
        store.prepare('start: "a"', scope)
        while not store.prepare('start: "a"', scope):
            store.wait(0.1)
            assert time.monotonic() < deadline
    assert len(compiled) == 5
    assert store._scopes['start: "a"'] == {"", "one", "two"}


def test_of_too_many_grammars_the_oldest_is_compiled_again(folder):
    store = Grammars(folder, PADDED, max_compiled=2)
    for text in ('start: "a"', 'start: "b"', 'start: "c"'):
        store.matcher(text)
    assert list(store._compiled) == [('start: "b"', ""), ('start: "c"', "")]
    store.matcher('start: "a"')
    assert list(store._compiled) == [('start: "c"', ""), ('start: "a"', "")]
    assert set(store._scopes) == {'start: "c"', 'start: "a"'}


def test_a_panic_of_the_library_is_an_error_for_who_waits(folder, monkeypatch):
    class Panic(BaseException):
        pass

    def panic(*_, **__):
        raise Panic

    monkeypatch.setattr(grammars_module, "LLMatcher", panic)
    store = Grammars(folder, PADDED)
    store.prepare("start: /x/", "")
    deadline = time.monotonic() + 300
    while not store.prepare("start: /x/", ""):
        store.wait(0.1)
        assert time.monotonic() < deadline
    assert store.error("start: /x/") == "the grammar cannot be compiled (Panic)"


MANY_STATES = "start: (w)+\nw: " + " | ".join(f"/[a-z]*{chr(97 + i % 26)}[a-z]{{{i % 13}}}/" for i in range(60))


def followed(constraints: Constraints, output: tuple[int, ...], *, sequence_id: int) -> list[bytes]:
    """The masks before each of the tokens."""
    masks = []
    for at in range(len(output)):
        found = constraints.allowed([row(MANY_STATES, output[:at], sequence_id=sequence_id)], PADDED)
        assert not found.errors
        masks.append(found.masks[0].tobytes())
    return masks


def written(constraints: Constraints, *, sequence_id: int, most: int) -> tuple[int, ...]:
    """Random tokens within the grammar, until it cannot be followed or there are so many."""
    dice, output = np.random.default_rng(sequence_id), ()
    while len(output) < most:
        found = constraints.allowed([row(MANY_STATES, output, sequence_id=sequence_id)], PADDED)
        if found.errors:
            break
        bits = np.unpackbits(found.masks[0].view(np.uint8), bitorder="little")
        output = (*output, int(dice.choice([i for i in np.flatnonzero(bits) if i not in (EOS, 0)])))
    return output


def test_outputs_that_use_up_a_lexer_take_nothing_from_others(folder, monkeypatch):
    """All outputs of a grammar share its lexer, whose states are limited."""
    monkeypatch.setitem(grammars_module.GRAMMAR_LIMITS, "max_lexer_states", 3000)
    output = written(Constraints(Grammars(folder, PADDED)), sequence_id=1, most=20)
    masks = followed(Constraints(Grammars(folder, PADDED)), output, sequence_id=1)
    together = Constraints(Grammars(folder, PADDED))
    assert followed(together, output[:10], sequence_id=1) == masks[:10]
    used_up, texts = together._grammars.used_up, []
    monkeypatch.setattr(together._grammars, "used_up", lambda text: texts.append(text) or used_up(text))
    for other in range(2, 12):
        written(together, sequence_id=other, most=40)
    assert len(texts) > 3
    assert followed(together, output, sequence_id=1) == masks, "one that was under way"
    assert followed(together, output, sequence_id=99) == masks, "one that begins"


def test_a_large_grammar_is_not_compiled_again_within_a_step(folder, monkeypatch):
    monkeypatch.setitem(grammars_module.GRAMMAR_LIMITS, "max_lexer_states", 3000)
    monkeypatch.setattr(grammars_module, "_LONGEST_PAUSE", -1.0)
    constraints = Constraints(Grammars(folder, PADDED))
    lengths = [len(written(constraints, sequence_id=other, most=40)) for other in range(2, 12)]
    assert min(lengths) < 40
    assert lengths[-1] > 0, "who begins has a lexer that is not used up"


def test_a_failure_of_any_kind_ends_one_grammar_and_not_the_thread(tmp_path: Path, monkeypatch) -> None:
    """Else requests with grammars would wait for ever in an engine that is well otherwise."""
    store = Grammars(tmp_path, 8)

    def fail() -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(store, "warm_up", fail)
    for text in ('start: "a"', 'start: "b"'):
        deadline = time.monotonic() + 300
        while not store.prepare(text, ""):
            assert time.monotonic() < deadline
            store.wait(0.01)
        assert store.error(text) == "the grammar cannot be compiled (RuntimeError)"
