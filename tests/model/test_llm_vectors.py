"""Vectors and scores without a server: the server's own, the same after a crash, and the tokenizer beside them."""

from __future__ import annotations

import base64
import math
import signal
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from quire import LLM, SamplingParams
from support.checkpoints import shared_checkpoint
from support.covering import few
from support.served_answers import answers_of

SETTINGS: dict[str, Any] = {"kv_memory": 8 << 20, "num_threads": 1, "max_model_len": 256}
TEXTS = ["Once upon a time", "The capital of France is Paris.", "Once upon a time there was", "x" * 200]


@pytest.fixture(scope="module", params=few(["last", "mean"], "mean"))
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM("quire-demo", pooling=request.param, **SETTINGS) as made:
        yield made


def vectors(llm: LLM, prompts: Any, **options: Any) -> list[list[float]]:
    return [output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False, **options)]


def test_together_they_are_what_each_is_alone(llm: LLM) -> None:
    outputs = llm.embed(TEXTS, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [llm.get_tokenizer().encode(text) for text in TEXTS]
    for output, text in zip(outputs, TEXTS, strict=True):
        assert vectors(llm, text) == [output.outputs.embedding]
        assert math.hypot(*output.outputs.embedding) == pytest.approx(1, abs=1e-12)
        assert output.outputs.hidden_size == len(output.outputs.embedding) > 100


def test_beside_generation_they_are_the_same(llm: LLM) -> None:
    alone = vectors(llm, TEXTS)
    llm.generate(TEXTS, SamplingParams(max_tokens=20, temperature=0), use_tqdm=False)
    assert vectors(llm, TEXTS) == alone


def test_dimensions_and_lengths(llm: LLM) -> None:
    (raw,) = vectors(llm, TEXTS[0], normalize=False)
    (cut,) = vectors(llm, TEXTS[0], dimensions=16)
    length = math.hypot(*raw[:16])
    assert cut == [value / length for value in raw[:16]]
    ids = llm.get_tokenizer().encode(TEXTS[1])
    assert vectors(llm, TEXTS[1], truncate_prompt_tokens=3) == vectors(llm, [ids[:3]])
    for wrong in ({"dimensions": 0}, {"dimensions": 10**6}, {"truncate_prompt_tokens": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            vectors(llm, TEXTS[0], **wrong)


def test_scores_are_cosines(llm: LLM) -> None:
    left, *right = vectors(llm, TEXTS)
    outputs = llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)
    assert [output.outputs.score for output in outputs] == pytest.approx(
        [sum(a * b for a, b in zip(left, other, strict=True)) for other in right], abs=1e-12
    )
    assert llm.score(TEXTS[:2], TEXTS[2:], use_tqdm=False)[0].outputs.score == outputs[1].outputs.score
    with pytest.raises(ValueError, match="2 and 3 texts"):
        llm.score(TEXTS[:2], TEXTS[:3])


@pytest.mark.parametrize("llm", ["mean"], indirect=True)
def test_like_texts_score_higher(llm: LLM) -> None:
    near, far = llm.score("The cat sat on the mat", ["The cat sits on a mat", "12 + 30 = 42"], use_tqdm=False)
    assert near.outputs.score > far.outputs.score


@pytest.mark.matrix  # as a crash in test_llm_life.py
def test_an_engine_that_is_killed_is_a_pause() -> None:
    with LLM(str(shared_checkpoint("llama")), pooling="mean", **{**SETTINGS, "max_num_seqs": 4}) as llm:
        prompts = [[60 + i % 50] * (100 + i % 90) for i in range(400)]
        wanted = vectors(llm, prompts)
        supervisor = llm._thread._supervisor
        assert supervisor is not None
        engine = psutil.Process(supervisor.pid)

        def kill() -> None:
            deadline = time.monotonic() + 300
            while not llm._thread._state.client.in_flight and time.monotonic() < deadline:
                time.sleep(0.005)
            engine.send_signal(signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        assert vectors(llm, prompts) == wanted
        killer.join()
        assert supervisor.restarts == 1


def test_the_tokenizer(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("Hello, world")
    assert tokenizer.decode(ids) == "Hello, world"
    assert "".join(tokenizer.convert_ids_to_tokens(ids)).startswith("Hello")
    messages = [{"role": "user", "content": "Hello!"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True) == tokenizer.encode(
        text, add_special_tokens=False
    )
    (output,) = llm.chat(messages, SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.prompt_token_ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert len(tokenizer) == tokenizer.vocab_size > max(ids)
    assert tokenizer.eos_token_id == tokenizer.encode(tokenizer.eos_token)[-1]


def test_the_server_gives_the_same(llm: LLM) -> None:
    state = llm._thread._state
    assert state is not None
    bodies = [{"input": TEXTS, "encoding_format": encoding} for encoding in ("float", "base64")]
    pairs = {"text_1": TEXTS[0], "text_2": TEXTS[1:]}
    asked = [*(("/v1/embeddings", body) for body in bodies), ("/v1/score", pairs)]
    numbers, encoded, scores = llm._thread.call(answers_of(state, asked))
    wanted = vectors(llm, TEXTS)
    size = len(wanted[0])
    for own, number, text in zip(wanted, numbers["data"], encoded["data"], strict=True):
        single = list(struct.unpack(f"<{size}f", struct.pack(f"<{size}f", *own)))
        assert number["embedding"] == single
        assert list(struct.unpack(f"<{size}f", base64.b64decode(text["embedding"]))) == single
    own = llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)
    assert [entry["score"] for entry in scores["data"]] == [output.outputs.score for output in own]
