"""Grammars and limits of thinking in whole engines: the same tokens however they come about, and always within."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from quire_engine.build import BuiltEngine, build
from quire_engine.contract.config import EngineConfig
from quire_engine.contract.limits import SchedulerLimits
from quire_engine.contract.types import GenerationRequest, SamplingParams, StopParams, ThinkingParams
from quire_engine.demo import demo_model_path
from support.offline import Generated, generate

EOS = (0, 2)
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "temperature_in_celsius": {"type": "integer", "minimum": -40, "maximum": 60},
        "sky": {"enum": ["clear", "cloudy", "rain"]},
        "days": {"type": "array", "items": {"enum": ["Monday", "Tuesday"]}, "maxItems": 3},
    },
    "required": ["city", "temperature_in_celsius", "sky"],
    "additionalProperties": False,
}
THINKING = ThinkingParams(end_ids=(2,), is_open=True, max_tokens=9)
OPENER, CLOSER = 6, 7  # the embedded model's marks around thoughts
CHOICE = f'start: (<[{OPENER}]> /[a-z ]{{0,9}}/ <[{CLOSER}]>)? ("yes" | "no")'
LIKELY = ((OPENER, 13.0),)
Results = dict[tuple[str, int], Generated]


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))


@cache
def vocabulary() -> LLTokenizer:
    return LLTokenizer(
        (demo_model_path() / "tokenizer.json").read_text(), n_vocab=tokenizer().get_vocab_size(), eos_token=[0, 2]
    )


def engine(blocks: int = 400, **limits) -> BuiltEngine:
    """A new one over the embedded model."""
    asked = EngineConfig(
        model=str(demo_model_path()),
        device="cpu",
        num_threads=1,
        kv_memory=1,
        max_model_len=320,
        limits=SchedulerLimits(**{"max_num_seqs": 8, **limits}),
    )
    return build(replace(asked, kv_memory=blocks * block_bytes()))


@cache
def block_bytes() -> int:
    asked = EngineConfig(model=str(demo_model_path()), device="cpu", kv_memory=8 << 20)
    return build(asked).plan.pool.bytes_per_block


def prompt(text: str) -> tuple[int, ...]:
    return tuple(tokenizer().encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n").ids)


def asked(name: str, text: str = "What is the weather?", *, n: int = 1, max_tokens: int = 90, **sampling):
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=prompt(text),
        sampling=SamplingParams(**sampling),
        stop=StopParams(max_new_tokens=max_tokens, stop_token_ids=EOS),
        n=n,
    )


def json_grammar(schema: object) -> str:
    return f"start: %json {json.dumps({**schema, 'x-guidance': {'whitespace_flexible': False}})}"


def requests() -> list[GenerationRequest]:
    grammar = json_grammar(WEATHER)
    return [
        asked("greedy", temperature=0.0, grammar=grammar),
        asked("drawn", temperature=1.0, seed=1, grammar=grammar, n=3),
        asked(
            "hot",
            "Name three cities.",
            temperature=1.7,
            top_p=0.9,
            seed=2,
            grammar=r"start: /[A-Z][a-z]{3,9}(, [A-Z][a-z]+){2}\./",
        ),
        asked("told", temperature=0.8, top_k=40, seed=3, grammar=grammar, num_logprobs=2),
        asked("penalised", temperature=1.0, seed=4, grammar=grammar, presence_penalty=0.7, logit_bias=((300, 4.0),)),
        asked(
            "thinking",
            "Tell me a long story.",
            temperature=0.9,
            seed=5,
            thinking=replace(THINKING, end_ids=(1, 1)),
            n=2,
        ),
        asked(
            "both",
            temperature=1.0,
            seed=6,
            thinking=replace(THINKING, end_ids=(1,)),
            grammar='start: /(.|\\n)*/ <[1]> "{\\"sky\\":" ("true" | "false") "}"',
        ),
        asked("unasked", temperature=0.0, grammar=CHOICE, thinking_opener=OPENER),
        asked(
            "undecided",
            temperature=1.0,
            seed=8,
            grammar=CHOICE,
            thinking_opener=OPENER,
            logit_bias=LIKELY,
            n=4,
            max_tokens=40,
        ),
        asked("late", temperature=1.0, seed=7, grammar="start: /[a-z ]*/", min_tokens=20, max_tokens=30),
        *(
            asked(f"free {seed}", "Tell me a long story.", temperature=0.9, seed=seed, max_tokens=100)
            for seed in (8, 9, 10)
        ),
    ]


@cache
def alone() -> Results:
    """One request after the other, each with the engine to itself and without the blocks of others."""
    found: Results = {}
    built = engine(enable_prefix_caching=False)
    for request in requests():
        found |= generate(built, [request])
    return found


def text_of(generated: Generated) -> str:
    ids = generated.token_ids
    return tokenizer().decode(ids[:-1] if ids[-1] in EOS else ids, skip_special_tokens=False)


def test_every_output_is_within_its_grammar():
    found = alone()
    assert not [one.error for one in found.values() if one.error]
    ended = [key for key, one in found.items() if one.finish == "stop"]
    for key in (("greedy", 0), ("drawn", 0), ("drawn", 2), ("told", 0), ("penalised", 0)):
        assert key in ended, key
        reply = json.loads(text_of(found[key]))
        assert {"city", "temperature_in_celsius", "sky"} <= set(reply) <= set(WEATHER["properties"])
        assert -40 <= reply["temperature_in_celsius"] <= 60
        assert reply["sky"] in ("clear", "cloudy", "rain")
    assert re.fullmatch(r"[A-Z][a-z]{3,9}(, [A-Z][a-z]+){2}\.", text_of(found["hot", 0]))
    assert len({tuple(found["drawn", choice].token_ids) for choice in range(3)}) == 3
    for choice in range(2):
        ids = found["thinking", choice].token_ids
        assert ids[9:11] == [1, 1] or [1, 1] in [ids[i : i + 2] for i in range(9)]
    both = found["both", 0].token_ids
    assert 1 in both[:10]
    assert text_of(found["both", 0]).split("<|im_start|>")[1] in ('{"sky":true}', '{"sky":false}')
    assert len(found["late", 0].token_ids) >= 20


def test_a_grammar_does_not_make_the_model_think():
    """It thinks where it would have begun to without the grammar: by the same draw of the same request."""
    answers = ("yes", "no")
    assert text_of(alone()["unasked", 0]) in answers
    undecided = [alone()["undecided", choice] for choice in range(4)]
    opened = [one.token_ids[0] == OPENER for one in undecided]
    free = generate(engine(), [asked("undecided", temperature=1.0, seed=8, logit_bias=LIKELY, n=4, max_tokens=1)])
    assert opened == [free["undecided", choice].token_ids[0] == OPENER for choice in range(4)]
    assert {True, False} == set(opened)
    assert all((text_of(one) in answers) != thinks for one, thinks in zip(undecided, opened, strict=True))


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"prefill_chunk": 16, "max_num_batched_tokens": 26, "max_num_seqs": 10},
        {"blocks": 22, "max_num_seqs": 8},
        {"block_size": 32, "enable_prefix_caching": False},
    ],
    ids=["together", "chunked", "preempted", "other blocks"],
)
def test_however_they_are_scheduled_the_tokens_are_those_of_each_alone(limits):
    found = generate(engine(**limits), requests())
    assert found == alone()
    if "blocks" in limits:
        assert sum(one.num_preemptions for one in found.values()) > 0


def test_tokens_that_must_come_are_the_tokens_that_would_have_come():
    slices = {}
    for most in (0, 2, 7):
        counted: list[int] = []
        built = engine()
        built.executor._runner._constraints._max_forced = most
        assert (
            generate(built, requests(), on_batch=lambda batch, counted=counted: counted.append(len(batch.items)))
            == alone()
        )
        slices[most] = sum(counted)
    assert slices[7] < slices[2] < slices[0]


@pytest.mark.parametrize("seed", range(3))
def test_what_is_resumed_goes_on_as_it_would_have(seed):
    """As after kill -9: a new engine is told what was sent, cut anywhere, in the middle of forced tokens too."""
    dice = random.Random(seed)
    resumed, finished = [], {}
    for request in requests():
        if request.sampling.num_logprobs is not None:
            continue
        whole = [alone()[request.request_id, choice].token_ids for choice in range(request.n)]
        cuts = tuple(tuple(ids[: dice.randrange(len(ids))]) for ids in whole)
        resumed.append(replace(request, resumed_token_ids=cuts))
        finished |= {
            (request.request_id, i): list(ids[len(cut) :]) for i, (ids, cut) in enumerate(zip(whole, cuts, strict=True))
        }
    found = generate(engine(), resumed)
    assert {key: one.token_ids for key, one in found.items()} == finished


def test_a_bomb_fails_alone():
    bomb = "start: " + " ".join(f'"{chr(97 + i % 26)}"?' for i in range(2000))
    wanted = requests()[:3]
    found = generate(
        engine(), [asked("bomb", temperature=1.0, grammar=bomb), asked("none", grammar="start: x"), *wanted]
    )
    for name in ("bomb", "none"):
        assert found[name, 0].finish == "error"
        assert "grammar" in str(found[name, 0].error)
    assert {key: one for key, one in found.items() if key[0] not in ("bomb", "none")} == {
        key: one for key, one in alone().items() if key[0] in {request.request_id for request in wanted}
    }


_WORDS = st.lists(
    st.sampled_from(["city", "name", "Paris", "is", "a-b", "no", "7", "ü", "\\n"]), min_size=1, max_size=4
)
_LEAVES = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "integer", "minimum": 0, "maximum": 99}]),
    st.integers(1, 8).map(lambda length: {"type": "string", "maxLength": length}),
    _WORDS.map(lambda words: {"enum": words}),
    st.sampled_from(["^[a-c]{2}$", "^[0-9]{3}-[0-9]$", "^(yes|no)?$"]).map(lambda p: {"type": "string", "pattern": p}),
)
_SCHEMAS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 2)),
        st.dictionaries(st.sampled_from(["a", "b c", "city", "ünit"]), inner, min_size=1, max_size=3).map(
            lambda properties: {
                "type": "object",
                "properties": properties,
                "required": sorted(properties)[:2],
                "additionalProperties": False,
            }
        ),
    ),
    max_leaves=4,
)
_REGEXES = st.sampled_from(
    [r"[a-z]{2,5}(ing|ed)", r"(\+|-)?[0-9]{1,4}(\.[0-9])?", r"a*b?c{1,3}", r"(the |a )?[dog]{1,6}\."]
)


@cache
def shared_engine() -> BuiltEngine:
    return engine()


@pytest.mark.matrix  # as does `make schema-test`; outputs within grammars stay
@settings(max_examples=40, deadline=None)
@given(schema=_SCHEMAS, regex=_REGEXES, seed=st.integers(0, 1 << 30))
def test_whatever_is_finished_is_accepted_by_a_matcher_that_has_seen_nothing(schema, regex, seed):
    grammars = {"schema": json_grammar(schema), "regex": f"start: /{regex}/"}
    wanted = [
        asked(name, temperature=1.0, seed=seed, grammar=grammar, max_tokens=120) for name, grammar in grammars.items()
    ]
    for (name, _), one in generate(shared_engine(), wanted).items():
        assert one.error is None, one.error
        matcher = LLMatcher(vocabulary(), grammars[name])
        kept = one.token_ids[:-1] if one.finish == "stop" else one.token_ids
        assert matcher.consume_tokens(kept), matcher.get_error()
        assert matcher.is_accepting() or one.finish == "length"
        if one.finish == "stop" and name == "schema":
            json.loads(text_of(one))
        if one.finish == "stop" and name == "regex":
            assert re.fullmatch(regex, text_of(one))
