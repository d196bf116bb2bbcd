"""An LLM from its start to its end: many prompts, interruptions, a crash, threads, event loops, what is left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import psutil
import pytest

from quire import LLM, RequestOutput, SamplingParams
from quire_engine.contract.types import EngineStats
from quire_server.state import ServerState
from support.checkpoints import shared_checkpoint, write_tokenizer

SETTINGS: dict[str, object] = {"kv_memory": 2 << 20, "num_threads": 1, "max_num_seqs": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
A_WHILE = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model without a chat template and vectors. What its end leaves is looked at when all tests have run."""
    source, path = shared_checkpoint("llama"), tmp_path_factory.mktemp("plain")
    for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json"):
        (path / name).symlink_to(source / name)
    made = LLM(path, pooling="none", **SETTINGS)
    try:
        yield made
        engine, thread = engine_of(made), made._thread._thread
    finally:
        made.close()
    made.close()
    assert not engine.is_running()
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        made.generate("a", GREEDY)


def engine_of(llm: LLM) -> psutil.Process:
    supervisor = llm._thread._supervisor
    assert supervisor is not None
    return psutil.Process(supervisor.pid)


def state_of(llm: LLM) -> ServerState:
    assert llm._thread._state is not None
    return llm._thread._state


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def soon(action: Callable[[], None], llm: LLM) -> threading.Thread:
    """Do it once the engine computes something."""

    def wait() -> None:
        deadline = time.monotonic() + 300
        while not state_of(llm).client.in_flight and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.05)
        action()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_more_prompts_than_run_or_wait_at_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four run, a few hundred wait in the engine, the others here; each gets what it gets alone."""
    seen: list[EngineStats] = []
    metrics = state_of(llm).metrics
    observe = metrics.observe_step
    monkeypatch.setattr(metrics, "observe_step", lambda stats, *tokens: (seen.append(stats), observe(stats, *tokens)))
    prompts = [f"{number} quires of paper" for number in range(300)]
    assert len(prompts) > state_of(llm).client.max_sequences
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    ids = [int(output.request_id) for output in outputs]
    assert ids == list(range(ids[0], ids[0] + len(prompts)))
    assert max(stats.running for stats in seen) == SETTINGS["max_num_seqs"]
    assert max(sum(stats.waiting.values()) for stats in seen) > 200
    for number in (0, 150, 299):
        assert texts(llm.generate(prompts[number], GREEDY, use_tqdm=False)) == [texts(outputs)[number]]


def test_a_prompt_that_is_too_long_stops_all_before_anything_runs(llm: LLM) -> None:
    before = state_of(llm).metrics.throughput().computed
    with pytest.raises(ValueError, match=r"^prompt 1: .*512 tokens, but the prompt has 600"):
        llm.generate(["short", [70] * 600], GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match=r"^prompt 2: Token id 9999 .* outside the vocabulary"):
        llm.generate(["short", "short", [9999]], GREEDY, use_tqdm=False)
    assert state_of(llm).metrics.throughput().computed == before


def test_nothing_asked_is_nothing_answered(llm: LLM) -> None:
    assert llm.generate([], use_tqdm=False) == []


def test_ctrl_c_ends_the_call_and_nothing_else(llm: LLM) -> None:
    expected = llm.generate("The quick", GREEDY, use_tqdm=False)
    pid, before = engine_of(llm).pid, state_of(llm).metrics.throughput().generated
    main = threading.main_thread().ident
    assert main is not None
    thread = soon(lambda: signal.pthread_kill(main, signal.SIGINT), llm)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["A quire"] * 100, LONG, use_tqdm=False)
    thread.join()
    assert texts(llm.generate("The quick", GREEDY, use_tqdm=False)) == texts(expected)
    assert state_of(llm).client.in_flight == 0
    assert 0 < state_of(llm).metrics.throughput().generated - before < 50 * 400, "what was interrupted went on"
    assert engine_of(llm).pid == pid


def test_a_crash_of_the_engine_is_a_pause(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [f"{number} sheets" for number in range(6)]
    expected = llm.generate(prompts, A_WHILE, use_tqdm=False)
    pid, metrics, steps = engine_of(llm).pid, state_of(llm).metrics, count(1)
    observe = metrics.observe_step

    def kill_once(stats: EngineStats, *tokens: int) -> None:
        if next(steps) == 3:
            os.kill(pid, signal.SIGKILL)
        observe(stats, *tokens)

    monkeypatch.setattr(metrics, "observe_step", kill_once)
    outputs = llm.generate(prompts, A_WHILE, use_tqdm=False)
    assert next(steps) > 3
    assert engine_of(llm).pid != pid
    assert texts(outputs) == texts(expected)


def test_it_works_inside_a_running_event_loop_and_from_many_threads(llm: LLM) -> None:
    """As in a notebook, whose cells run on a loop."""
    prompts = [f"{number} leaves" for number in range(4)]
    expected = texts(llm.generate(prompts, GREEDY, use_tqdm=False))

    async def cell() -> list[RequestOutput]:
        return llm.generate(prompts, GREEDY, use_tqdm=False)

    assert texts(asyncio.run(cell())) == expected
    with ThreadPoolExecutor(4) as pool:
        several = list(pool.map(lambda prompt: llm.generate(prompt, GREEDY, use_tqdm=False), prompts))
    assert [text for outputs in several for text in texts(outputs)] == expected


def test_the_bar_is_on_stderr(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Processed prompts" in shown.err
    assert "2/2" in shown.err
    assert "8 tokens" in shown.err
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


@pytest.mark.matrix  # close() alone is tried above
def test_close_from_another_thread_ends_a_call() -> None:
    made = LLM(str(shared_checkpoint("llama")), **SETTINGS)
    thread = soon(made.close, made)
    with pytest.raises(RuntimeError, match="closed while it was at work"):
        made.generate(["a"] * 100, LONG, use_tqdm=False)
    thread.join()


@pytest.mark.matrix  # close() is tried above, the end of a script in test_llm_scripts.py
def test_what_nobody_holds_is_ended() -> None:
    made = LLM(str(shared_checkpoint("llama")), **SETTINGS)
    made.generate("a", GREEDY, use_tqdm=False)
    engine = engine_of(made)
    del made
    gc.collect()
    assert not engine.is_running()


def test_an_engine_that_cannot_start_says_why_and_leaves_nothing(tmp_path) -> None:
    before = {child.pid for child in psutil.Process().children()}
    threads = {thread for thread in threading.enumerate() if thread.name == "quire"}
    write_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"config\.json"):
        LLM(tmp_path)
    with pytest.raises(ValueError, match="max_model_len"):
        LLM(str(shared_checkpoint("llama")), max_model_len=100_000, **SETTINGS)
    assert {child.pid for child in psutil.Process().children()} <= before
    assert {thread for thread in threading.enumerate() if thread.name == "quire"} == threads


@pytest.mark.matrix  # what those are: test_generation_defaults.py in tests/api
def test_calls_without_parameters_take_the_models_own(tmp_path) -> None:
    source = shared_checkpoint("llama")
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(source / name)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0, "top_k": 20, "max_new_tokens": 5}')
    with LLM(tmp_path, override_generation_config={"repetition_penalty": 1.1}, **SETTINGS) as made:
        own = SamplingParams(temperature=0, top_k=20, repetition_penalty=1.1, max_tokens=5)
        assert made.get_default_sampling_params() == own
        texts = [made.generate("a", each, use_tqdm=False)[0].outputs[0].token_ids for each in (None, own)]
        assert texts[0] == texts[1]
        chats = [made.chat([{"role": "user", "content": "a"}], each, use_tqdm=False) for each in (None, own)]
        assert chats[0][0].outputs[0].token_ids == chats[1][0].outputs[0].token_ids
        given = SamplingParams(temperature=0, max_tokens=3)
        with LLM(tmp_path, generation_config="none", **SETTINGS) as plain:
            assert plain.get_default_sampling_params() == SamplingParams()
            both = [each.generate("a", given, use_tqdm=False)[0].outputs[0].token_ids for each in (made, plain)]
        assert both[0] == both[1]
    with pytest.raises(ValueError, match="override_generation_config: warmth is not a sampling default"):
        LLM(tmp_path, override_generation_config={"warmth": 1}, **SETTINGS)


def test_a_model_without_a_chat_template_or_vectors_says_what_works(llm: LLM) -> None:
    with pytest.raises(ValueError, match="no chat template; use generate"):
        llm.chat([{"role": "user", "content": "Hello"}])
    with pytest.raises(ValueError, match="pooling none"):
        llm.embed("a", use_tqdm=False)
    assert len(llm.generate("Hello", GREEDY, use_tqdm=False)) == 1
