"""`quire chat` against the real listener: messages, commands, a stopped answer, and what it says when it cannot."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import sys
from pathlib import Path

import pytest

from quire_engine.contract.types import GenerationRequest
from support.fake_engine import FakeEngine
from support.fake_tokenizer import EOS
from support.fakes import listening, make_app

pytestmark = pytest.mark.anyio
SECONDS = 60.0  # only a hang takes so long


def hello(_request: GenerationRequest, _choice: int) -> list[int]:
    return [*b"Hello.\x1b[2J", EOS]


async def chat(url: str, *words: str, typed: str = "", **environment: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one chat that ends with what is typed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "quire_server.cli", "chat", "--url", url, *words),
        **{"stdin": pipe, "stdout": pipe, "stderr": pipe},
        env={**kept, **environment},
    )
    out, said = await asyncio.wait_for(process.communicate(typed.encode()), SECONDS)
    return process.returncode or 0, out.decode(), said.decode()


async def test_messages_and_commands(tmp_path: Path) -> None:
    engine, file = FakeEngine(replies=hello), tmp_path / "chat.json"
    app = make_app(engine=engine, model_names=("fake",))
    async with listening(app) as server:
        one = await chat(f"{server.address}/v1", "How", "are you?")
        assert one == (0, "Hello.[2J\n", ""), "what controls a terminal is not printed"
        said = 'a\\\nb\n/system Be brief.\n"""c\n\nd"""\n'
        typed = f"{said}/save {file}\n/save {file}\n/new\n/model\n/what\n/exit\nnot read\n"
        code, out, said = await chat(server.address, typed=typed)
    assert (code, said) == (0, "")
    assert out.splitlines() == [
        *("Hello.[2J", "The system prompt is set.", "Hello.[2J", f"Saved: {file}"),
        f"Not saved: [Errno 17] File exists: '{file}'",
        *("A new conversation.", "* fake", "No command /what; /help lists them."),
    ]
    answer = {"role": "assistant", "content": "Hello.\x1b[2J"}
    assert json.loads(file.read_text()) == {
        "model": "fake",
        "messages": [
            {"role": "system", "content": "Be brief."},
            *({"role": "user", "content": "a\nb"}, answer, {"role": "user", "content": "c\n\nd"}, answer),
        ],
    }
    assert len(engine.submitted) == 3


async def test_what_cannot_be_answered_is_one_line_and_the_message_is_taken_back(tmp_path: Path) -> None:
    engine, file = FakeEngine(replies=hello), tmp_path / "chat.json"
    async with listening(make_app(engine=engine, max_model_len=128)) as server:
        code, out, said = await chat(server.address, typed=f"{'long ' * 100}\nshort\n/save {file}\n")
        assert (code, out.count("Hello.")) == (1, 1), "a script sees that something failed"
        assert said.startswith("quire chat: This model's maximum context length is 128 tokens")
        assert [each["content"] for each in json.loads(file.read_text())["messages"]][:1] == ["short"]
        code, out, said = await chat(server.address, "--model", "gpt-4o", "hi")
        assert (code, out) == (1, "")
        assert said.startswith("quire chat: The model 'gpt-4o' does not exist. This server has 'fake'")
    code, out, said = await chat(server.address)
    assert (code, out) == (1, "")
    assert said == f"quire chat: nothing listens at {server.address}; start one: quire serve\n"


@pytest.mark.matrix  # keys of clients are tried in test_auth.py
async def test_a_key_is_asked_for_and_sent() -> None:
    async with listening(make_app(engine=FakeEngine(replies=hello), api_key=("me=abcdefghijklmnop", "q"))) as server:
        code, _, said = await chat(server.address, "hi")
        assert code == 1
        assert said.endswith("Give --api-key KEY or QUIRE_API_KEY.\n")
        for words, variable in ((("--api-key", "q"), {}), ((), {"QUIRE_API_KEY": "me=abcdefghijklmnop, q"})):
            assert await chat(server.address, *words, "hi", **variable) == (0, "Hello.[2J\n", "")


async def test_ctrl_c_stops_the_answer_and_ctrl_d_ends_the_chat() -> None:
    engine = FakeEngine(step_seconds=0.02)  # which answers until the context is full
    outer, inner = pty.openpty()
    async with listening(make_app(engine=engine, max_model_len=4096)) as server:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-c", _IN_A_TERMINAL, "chat", "--url", server.address),
            **dict.fromkeys(("stdin", "stdout", "stderr"), inner),
            start_new_session=True,
        )
        os.close(inner)
        read = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(read), os.fdopen(outer, "rb", buffering=0)
        )
        await until(read, b">>> ")
        os.write(outer, b"hi\n")
        await until(read, b"brown fox")
        os.write(outer, b"\x03")
        assert b"(stopped)" in await until(read, b">>> ")
        os.write(outer, b"\x03")
        assert b"Ctrl-D or /exit ends the chat." in await until(read, b">>> ")
        os.write(outer, b"\x04")
        assert await asyncio.wait_for(process.wait(), SECONDS) == 0
        transport.close()
        for _ in range(1000):
            if not engine.live:
                break
            await asyncio.sleep(0.01)
        assert engine.aborted, "the server has noticed that nobody reads on"


_IN_A_TERMINAL = (
    "import fcntl, termios, sys; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    "from quire_server.cli import program; sys.exit(program())"
)


async def until(read: asyncio.StreamReader, end: bytes) -> bytes:
    """What a terminal shows up to some text."""
    return await asyncio.wait_for(read.readuntil(end), SECONDS)
