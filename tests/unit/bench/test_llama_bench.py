"""llama-bench as a peer of `quire bench`, by a program that tells what it would."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from quire_bench.llama_bench import find_program, is_program
from quire_bench.servers import BenchError
from quire_bench.workload import Job, LoadPoint

pytestmark = pytest.mark.anyio
ALONE = LoadPoint(mode="concurrency", value=1)
# The two tests of a call, with times that tell of the lengths: a second for a token of a prompt, half of an answer's.
REPORT = """
import json
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
prompt, output, count = (int(flags[name]) for name in ("-p", "-n", "-r"))
assert flags["-m"] == "x.gguf" and flags["-o"] == "json" and int(flags["-t"]) >= 1
more = {"build_commit": "abc", "avg_ts": 1.0}
print(json.dumps([
    {"n_prompt": prompt, "n_gen": 0, "samples_ns": [prompt * 10**9] * count} | more,
    {"n_prompt": 0, "n_gen": output, "samples_ns": [output * 10**9 // 2] * count} | more,
]))
"""


def program(folder: Path, lines: str) -> str:
    file = folder / "llama-bench"
    file.write_text(f"#!{sys.executable}\nimport sys\n{lines}")
    file.chmod(0o755)
    return str(file)


async def test_requests_are_made_of_its_two_tests(tmp_path: Path) -> None:
    found = await find_program(program(tmp_path, REPORT), "ik", "x.gguf")
    assert (found.info.name, found.info.version, found.info.address) == ("ik", "abc", "")
    jobs = [
        Job(prompt=[1] * 3, output_tokens=4),
        Job(prompt=[1] * 5, output_tokens=2),
        Job(prompt=[2] * 3, output_tokens=4),
    ]
    run = await found.run(ALONE, jobs, None)
    assert run.seconds == pytest.approx(2 * (3 + 1.5) + 5 + 0.5)
    assert [record.input_tokens for record in run.records] == [3, 3, 5]
    first = run.records[0]
    assert [time - first.sent for time in first.arrivals] == pytest.approx([3.0, 3.5, 4.0, 4.5])
    assert run.records[1].sent == first.ended
    assert all(record.is_ok and record.output_tokens == record.asked_tokens for record in run.records)
    assert await found.kv_use() is None
    await found.close()


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ("print('| model |')", "tells something else"),
        ("print('[]')", "told nothing of 1 tokens"),
        ("print('no such model', file=sys.stderr); sys.exit(3)", "ended with 3: no such model"),
    ],
)
async def test_what_it_cannot_do_is_one_line(lines: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=complaint):
        await find_program(program(tmp_path, lines), None, "x.gguf")


async def test_a_program_that_is_not_there_or_cannot_be_started(tmp_path: Path) -> None:
    file = tmp_path / "llama-bench"
    with pytest.raises(BenchError, match="cannot be started: No such file"):
        await find_program(str(file), None, "x.gguf")
    file.write_text("")
    with pytest.raises(BenchError, match="cannot be started: Permission denied"):
        await find_program(str(file), None, "x.gguf")


def test_addresses_are_no_programs() -> None:
    assert is_program("/opt/llama.cpp/bin/llama-bench")
    assert not any(map(is_program, ("http://host/llama-bench", "llama-server", "http://127.0.0.1:8000")))
