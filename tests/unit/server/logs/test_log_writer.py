"""The thread that writes the log, and what feeds it: nobody waits for who reads; what is lost is counted and told."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from quire_server.logs import lost_lines, writing
from quire_server.logs.output import LineWriter, Output, Relay

ROOT = Path(__file__).parents[4]


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    for descriptor in (reader, writer):
        with suppress(OSError):
            os.close(descriptor)


def told(number: int) -> bytes:
    return f"lost {number}\n".encode()


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def drained(reader: int) -> bytes:
    """All that is in the pipe, which nobody writes to any more."""
    data = b""
    while more := os.read(reader, 1 << 16):
        data += more
    return data


def test_lines_come_out_in_order(pipe: tuple[int, int]):
    writer = LineWriter(pipe[1], told)
    for number in range(1000):
        writer.put(b"%d\n" % number)
    assert writer.close(5)
    os.close(pipe[1])
    assert [int(line) for line in drained(pipe[0]).split()] == list(range(1000))
    assert writer.lost == 0


def test_a_pipe_that_nobody_reads_costs_lines_and_no_time(pipe: tuple[int, int]):
    writer = LineWriter(pipe[1], told, most_bytes=100_000)
    line = b"x" * 99 + b"\n"
    started = time.monotonic()
    for _ in range(5000):
        writer.put(line)
    assert time.monotonic() - started < 30  # a write would never have come back
    assert 2000 < writer.lost < 5000
    lost = writer.lost
    reading = threading.Thread(target=lambda: result.append(drained(pipe[0])))
    result: list[bytes] = []
    reading.start()
    assert writer.close(300)
    os.close(pipe[1])
    reading.join(300)
    lines = result[0].split(b"\n")[:-1]
    assert lines.count(line[:-1]) == 5000 - lost
    assert [each for each in lines if each != line[:-1]] == [b"lost %d" % lost]


def test_what_was_lost_is_told_when_it_flows_again(pipe: tuple[int, int]):
    writer = LineWriter(pipe[1], told, most_bytes=200_000)
    big = b"y" * 150_000 + b"\n"  # more than a pipe holds: the write waits
    writer.put(big)
    until(lambda: not writer._lines)
    writer.put(big)
    assert writer.lost == 1
    got = b""
    while not got.endswith(b"lost 1\n"):
        got += os.read(pipe[0], 1 << 16)
    assert got == big + b"lost 1\n"
    writer.put(b"on it goes\n")
    assert os.read(pipe[0], 100) == b"on it goes\n"
    assert writer.close(5)


def test_the_end_has_a_time_limit(pipe: tuple[int, int]):
    writer = LineWriter(pipe[1], told)
    writer.put(b"z" * 500_000)
    started = time.monotonic()
    assert not writer.close(0.2)
    assert time.monotonic() - started < 30
    writer.put(b"too late\n")
    assert writer.lost == 1


def test_a_reader_that_is_gone_costs_lines_and_nothing_else(pipe: tuple[int, int]):
    os.close(pipe[0])
    writer = LineWriter(pipe[1], told)
    for _ in range(10):
        writer.put(b"nobody\n")
    until(lambda: writer.lost == 10)
    assert writer.close(5)


def test_a_disk_that_is_full_and_then_not(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch):
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        if descriptor == pipe[1]:
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    writer = LineWriter(pipe[1], told)
    with monkeypatch.context() as patched:
        patched.setattr("quire_server.logs.output.os.write", full)
        writer.put(b"one\n")
        until(lambda: writer.lost == 1)
    writer.put(b"two\n")
    assert writer.close(5)
    os.close(pipe[1])
    assert drained(pipe[0]) == b"two\nlost 1\n"


def test_a_descriptor_that_does_not_wait_is_waited_for(pipe: tuple[int, int]):
    os.set_blocking(pipe[1], False)
    writer = LineWriter(pipe[1], told)
    data = b"w" * 300_000 + b"\n"
    writer.put(data)
    got = b""
    while not got.endswith(b"\n"):
        got += os.read(pipe[0], 1 << 16)
        time.sleep(0.001)
    assert got == data
    assert writer.close(5)


def test_what_children_write_comes_in_whole_lines():
    seen: list[str] = []
    relay = Relay(seen.append)
    os.write(relay.descriptor, b"one\ntwo\nthr")
    until(lambda: bool(seen))
    os.write(relay.descriptor, b"ee\n\xff half")
    relay.close(5)
    assert "\n".join(seen).split("\n") == ["one", "two", "three", "\ufffd half"]


def test_a_child_that_lives_on_does_not_keep_us():
    relay = Relay(lambda _: None)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"], stderr=relay.descriptor)
    started = time.monotonic()
    relay.close(0.1)
    assert time.monotonic() - started < 30
    child.kill()
    child.wait()


def output_of(pipe: tuple[int, int], form: str, act: Callable[[Output], None]) -> list[str]:
    output = Output(form, pipe[1])  # type: ignore[arg-type]
    act(output)
    output.close()
    os.close(pipe[1])
    return drained(pipe[0]).decode().split("\n")[:-1]


@pytest.mark.parametrize("form", ["text", "json"])
def test_childrens_lines_and_last_words(pipe: tuple[int, int], form: str):
    def act(output: Output) -> None:
        output.say("quire serve: the model\n  is gone")
        os.write(output.for_children, b"Current thread 0x1:\n  File \x1b[31mx\n")

    lines = output_of(pipe, form, act)
    if form == "json":
        records = [json.loads(line) for line in lines]
        assert [(each["level"], each["message"]) for each in sorted(records, key=lambda each: each["level"])] == [
            ("critical", "quire serve: the model is gone"),
            ("info", "Current thread 0x1:\n  File \x1b[31mx"),
        ]
    else:
        assert sorted(lines) == sorted(["quire serve: the model is gone", "Current thread 0x1:", "  File \\x1b[31mx"])


def test_a_record_that_cannot_be_made_is_lost_and_no_more(pipe: tuple[int, int]):
    output = Output("text", pipe[1])
    output.handler.handle(logging.makeLogRecord({"msg": "%d", "args": ("no number",), "levelname": "INFO"}))
    output.handler.handle(logging.makeLogRecord({"msg": "good", "levelname": "INFO"}))
    output.close()
    os.close(pipe[1])
    lines = drained(pipe[0]).decode()
    assert "good" in lines
    assert "1 log lines were lost" in lines


SCRIPT = """
import logging, sys, threading, warnings
from quire_server.logs import output as settings, writing, lost_lines
settings.FLUSH_SECONDS = 0.2
with writing("info", {form!r}) as output:
    logging.getLogger("quire.x").info("a record")
    warnings.warn("a warning")
    thread = threading.Thread(target=lambda: 1 / 0, name="worker")
    thread.start()
    thread.join()
    class Sour:
        def __del__(self):
            raise ValueError("unraisable")
    Sour()
    {more}
print("done", file=sys.stdout)
"""


def run(form: str, more: str = "", **options: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}/server:{ROOT}/engine:{ROOT}/kernels"}
    command = [sys.executable, "-c", SCRIPT.format(form=form, more=more)]
    settings: dict[str, object] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run(command, env=environment, text=True, timeout=60, check=False, **settings)  # type: ignore[call-overload, no-any-return]


def test_all_that_a_process_says_is_json():
    done = run("json")
    assert (done.returncode, done.stdout) == (0, "done\n")
    records = [json.loads(line) for line in done.stderr.splitlines()]
    said = "\n".join(record["message"] + record.get("exception", "") for record in records)
    for word in ("a record", "a warning", "ZeroDivisionError", "unraisable"):
        assert word in said


def test_a_process_whose_stderr_is_closed_or_never_read_ends_as_it_should():
    reader, writer = os.pipe()
    done = run("text", 'for _ in range(20_000): logging.getLogger("quire.x").info("y" * 90)', stderr=writer)
    assert (done.returncode, done.stdout) == (0, "done\n")
    os.close(reader)
    done = run("text", "sys.stdout.write(str(lost_lines() > 0) + ' ')", stderr=writer)
    os.close(writer)
    assert done.returncode == 0
    more = "import os; assert os.fstat(2).st_rdev == os.stat(os.devnull).st_rdev"
    shell = f"exec {sys.executable} -c '{SCRIPT.format(form='text', more=more).replace(chr(39), chr(34))}' 2>&-"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}/server:{ROOT}/engine:{ROOT}/kernels"}
    done = subprocess.run(["sh", "-c", shell], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n")


def test_handlers_and_hooks_are_put_back():
    root = logging.getLogger()
    before = root.handlers[:], threading.excepthook, sys.unraisablehook
    level = root.level
    with writing("info", "text"):
        assert root.handlers != before[0]
        assert lost_lines() == 0
    root.setLevel(level)
    assert (root.handlers[:], threading.excepthook, sys.unraisablehook) == before


CHILD = """
import faulthandler, os, signal, sys
sys.stderr.write("x" * 99 + "\\n")
for _ in range(30_000):
    os.write(2, b"y" * 99 + b"\\n")
faulthandler.register(signal.SIGUSR1, all_threads=True)
os.kill(os.getpid(), signal.SIGUSR1)
"""


def test_a_child_that_says_a_lot_waits_for_nobody(pipe: tuple[int, int]):
    """Three megabytes, with a log that nobody reads."""
    output = Output("text", pipe[1])
    child = subprocess.run([sys.executable, "-c", CHILD], stderr=output.for_children, timeout=60, check=False)
    assert child.returncode == 0
    until(lambda: output.handler.writer.lost > 0)
    os.close(pipe[0])  # or the thread would go on writing to whatever has the descriptor's number next
    output.close()


def test_the_stacks_of_a_hung_child_come_through(pipe: tuple[int, int]):
    output = Output("json", pipe[1])
    script = CHILD.replace("30_000", "0")
    subprocess.run([sys.executable, "-c", script], stderr=output.for_children, timeout=60, check=True)
    output.close()
    os.close(pipe[1])
    said = "\n".join(json.loads(line)["message"] for line in drained(pipe[0]).splitlines())
    assert "most recent call first" in said
    assert 'File "<string>", line 7' in said
