"""`--warm-prefix`: what its lines become, in whose names they are computed, and wrong lines by their numbers."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from quire_engine.contract.errors import ConfigError
from quire_server.programs.warming import read_prefixes, warm
from support.fake_engine import FakeEngine
from support.fakes import make_app, make_state

pytestmark = pytest.mark.anyio

CHAT = {"messages": [{"role": "system", "content": "Be brief."}]}


def written(folder: Path, *lines: object) -> Path:
    path = folder / "prefixes.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


async def test_each_line_is_a_prompt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="quire.warming")
    engine = FakeEngine(num_cached_tokens=2)
    state = make_state(engine=engine)
    path = written(tmp_path, {"prompt": "Once upon"}, "", CHAT, {"prompt": [65, 66, 67], "cache_salt": "s"})
    await warm(state, make_app(state), path)
    text, chat, ids = engine.submitted
    assert bytes(text.prompt_token_ids) == b"Once upon"
    assert ids.prompt_token_ids == (65, 66, 67)
    assert ids.cache_salt
    assert not text.cache_salt
    assert {each.stop.max_new_tokens for each in engine.submitted} == {1}
    assert b"Be brief." in bytes(token for token in chat.prompt_token_ids if token < 256)
    assert b"assistant" not in bytes(token for token in chat.prompt_token_ids if token < 256)
    total = sum(len(each.prompt_token_ids) for each in engine.submitted)
    assert f"prefixes: {total - 6} tokens computed, 6 were cached, 0 requests failed" in caplog.text


async def test_it_is_computed_for_those_who_may_find_it(tmp_path: Path) -> None:
    engine = FakeEngine()
    state = make_state(engine=engine, api_key=("alice=0123456789", "bob=9876543210", "plain-key"))
    await warm(state, make_app(state), written(tmp_path, {"prompt": "a"}, {"prompt": "b", "for": "bob"}))
    of_all, of_bob = [each for each in engine.submitted if each.prompt_token_ids == (97,)], engine.submitted[-1]
    assert len(engine.submitted) == 4
    assert len({each.cache_salt for each in of_all}) == 3
    assert of_bob.cache_salt in {each.cache_salt for each in of_all}
    with pytest.raises(ConfigError, match=r"prefixes.jsonl, line 1: no tenant or key has the name 'eve'"):
        await warm(state, make_app(state), written(tmp_path, {"prompt": "b", "for": "eve"}))
    with pytest.raises(ConfigError, match=r"line 1: 'for' names a tenant or a key, and this server has none"):
        await warm(make_state(), make_app(), written(tmp_path, {"prompt": "b", "for": "bob"}))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "is no JSON"),
        ("[1]", "is no JSON object"),
        ('{"text": "a"}', "needs either 'messages', as a chat has them, or a 'prompt'"),
        ('{"prompt": "a", "messages": []}', "needs either"),
        ('{"prompt": "a", "for": 1}', "'for' is the name"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = written(tmp_path, {"prompt": "a"}, "", line)
    with pytest.raises(ConfigError, match=f"--warm-prefix {path}, line 3: {problem}"):
        read_prefixes(path)


def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none: cannot be read: No such file"):
        read_prefixes(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"has no prefix"):
        read_prefixes(written(tmp_path, "", "  "))


async def test_what_the_server_refuses_is_named_and_what_it_lacks_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = make_state(max_model_len=64)
    for line, problem in (
        ({"prompt": "a" * 100}, "line 2: .*64"),
        ({"prompt": "a", "temperature": 9}, "line 2: .*temperature"),
        ({"prompt": "a", "model": "other"}, "line 2: .*other"),
    ):
        with pytest.raises(ConfigError, match=problem):
            await warm(state, make_app(state), written(tmp_path, {"prompt": "a"}, line))
    state.phase.draining = True
    await warm(state, make_app(state), written(tmp_path, {"prompt": "a"}))
    assert "line 1: not computed: " in caplog.text
    with pytest.raises(ConfigError, match="--set enable_prefix_caching=false"):
        await warm(make_state(enable_prefix_caching=False), make_app(), tmp_path)
