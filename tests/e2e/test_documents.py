"""Every example of the documents does what is shown: requests and scripts are run, command lines read."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import pytest

from e2e.served import Served
from quire_engine.demo import demo_model_path
from quire_server.settings.migration import SERVERS
from support.documents import FOR_USERS, ROOT, text

pytestmark = pytest.mark.e2e

PARTS = ("server", "engine", "kernels", "benchmarks", "lab")
OURS = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in PARTS)}
SHOWN_URL = "http://127.0.0.1:8000"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Different in every run; of examples that show them only their names count.
VOLATILE = {"id", "created", "system_fingerprint", "call_id", "item_id", "created_at", "completed_at"}
# What people are told about a request: times differ, and on a busy machine what took most of them.
TOLD = re.compile(r"\d+\.\d+ m?s\b|\d+%|(?<=went to ).*")
ELSEWHERE = {
    "make": "other tests of this folder start the server that way",
    "git": "which repository, its reader knows",
    "docker": "tests/e2e/test_image.py builds and runs the images",
    "pip": "tests/wheels installs the wheel",
    "uvx": "tests/wheels serves from the wheel",
    "pipx": "takes the wheel as uvx does",
    "eval": "tests/unit/server/commands/test_completion.py completes in bash",
    "QUIRE_MODEL=/model": "tests/unit/test_service_files.py holds the composition against its schema",
    "QUIRE_PROT=80": "tests/unit/server/commands/test_config.py compares what is said",
    "python": "tests/e2e/test_facts.py and test_exercises.py run the facts and exercises, tests/model/test_notebooks.py"
    " the loop",
}
# Scripts of packages that are not installed for development: tests/clients runs them with those packages.
OF_CLIENTS = "docs/clients.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One command of a console block, or one script, and what the document shows after it."""

    where: str
    kind: str
    text: str
    shown: str


def _examples() -> Iterator[Example]:
    for name in FOR_USERS:
        page = text(name)
        blocks = list(BLOCK.finditer(page))
        for block, following in zip_longest(blocks, blocks[1:]):
            kind, body = block[1], block[2]
            where = f"{name}:{page[: block.start()].count(chr(10)) + 1}"
            if kind == "console":
                for at, command in enumerate(re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]):
                    typed = re.match(r"(?:.*\\\n)*.*\n?", command)
                    assert typed is not None
                    yield Example(
                        where=f"{where}.{at}", kind=kind, text=typed[0].strip(), shown=command[typed.end() :].strip()
                    )
            elif kind == "python":
                follows = following is not None and not following[1] and following.start() - block.end() < 3
                yield Example(where=where, kind=kind, text=body, shown=following[2] if follows and following else "")


EXAMPLES = list(_examples())
SCRIPTS = [example for example in EXAMPLES if example.kind == "python" and not example.where.startswith(OF_CLIENTS)]
REQUESTS = [example for example in EXAMPLES if example.text.startswith("curl ")]
COMMANDS = [example for example in EXAMPLES if re.match(r"(\S*/)?quire ", example.text)]


def where(example: Example) -> str:
    return example.where


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with Served() as served:
        yield served


def test_every_example_is_looked_at() -> None:
    known = {example.where for example in (*SCRIPTS, *REQUESTS, *COMMANDS)}
    others = [
        example for example in EXAMPLES if example.where not in known and not example.where.startswith(OF_CLIENTS)
    ]
    assert not [example for example in others if example.text.split()[0] not in ELSEWHERE]
    assert len(SCRIPTS) >= 3
    assert len(REQUESTS) >= 2
    assert len(COMMANDS) >= 5


@pytest.mark.parametrize("example", [example for example in REQUESTS if example.shown], ids=where)
def test_an_answer_that_is_shown_is_not_drawn_by_lot(example: Example) -> None:
    assert (
        "/admin/" in example.text
        or "/debug/" in example.text
        or re.search(r'"temperature": 0\b(?!\.)|"seed": ', example.text)
    )


def _stable(value: object) -> object:
    if isinstance(value, dict):
        return {name: "…" if name in VOLATILE else _stable(inner) for name, inner in value.items()}
    return [_stable(inner) for inner in value] if isinstance(value, list) else value


def _frames(text: str) -> tuple[list[str], str, list[object]]:
    """The stable part of each event of a stream, the text of all completions in it, and each event's finish reason."""
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    texts: list[str] = []
    ends: list[object] = []
    frames = []
    for frame in data:
        if frame == "[DONE]":
            frames.append(frame)
            continue
        value = json.loads(frame)
        for choice in value.get("choices", ()):
            texts.append(choice.pop("text", ""))
            # On a busy machine one frame may have the whole text, and with it the end, which the first does not show.
            ends.append(choice.pop("finish_reason", None))
            choice.pop("stop_reason", None)
        frames.append(json.dumps(_stable(value)))
    return frames, "".join(texts), ends


@pytest.mark.parametrize("example", REQUESTS, ids=where)
def test_requests_are_answered_as_shown(example: Example, server: Served) -> None:
    command = example.text.replace(SHOWN_URL, server.url).replace("curl ", "curl -sS ", 1)
    if "| jq " in command and shutil.which("jq") is None:
        pytest.skip("no jq on this machine")
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=60, check=True
    )
    if "| jq -r " in command:
        assert TOLD.sub("…", done.stdout).split() == TOLD.sub("…", example.shown).split()
        return
    if done.stdout.startswith(("data: ", "event: ")):
        # One frame may have several tokens: the text counts, and the frames' shape.
        (said, text, ends), (expected, beginning, _) = _frames(done.stdout), _frames(example.shown)
        assert text.startswith(beginning)
        assert [frame for frame in expected if frame not in said] == []
        assert expected[-1] == said[-1]
        assert not any(ends[:-1]), "only the last one ends it"
        assert all(ends[-1:])
        return
    reply = json.loads(done.stdout)
    assert "error" not in reply or reply["error"] is None, reply
    if example.shown:
        assert _stable(reply) == _stable(json.loads("".join(example.shown.split("\n"))))


@pytest.mark.parametrize("example", SCRIPTS, ids=where)
def test_scripts_run_as_shown(example: Example, server: Served, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    model = str(demo_model_path())
    text = example.text.replace(SHOWN_URL, server.url).replace("/models/Qwen3-0.6B", model)
    text = text.replace("[9707, 11]", "[40, 11]")  # ids of Qwen's vocabulary, which is larger
    script.write_text(text.replace("max_model_len=8192", "max_model_len=512"), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env=OURS,
    )
    assert done.returncode == 0, done.stderr
    parts = [" ".join(part.split()) for part in example.shown.split("[...]")]
    assert all(part in " ".join(done.stdout.split()) for part in parts), done.stdout


@pytest.mark.matrix  # a minute or two of simulation, whose parts have tests of their own
def test_the_plan_in_serving_is_what_its_command_writes(tmp_path: Path) -> None:
    written = tmp_path / "SERVING.md"
    written.write_text(text("SERVING.md"), encoding="utf-8")
    (command,) = re.findall(r"^Again: `quire (plan .* --write) SERVING\.md`$", written.read_text(), re.MULTILINE)
    words = [sys.executable, "-m", "quire_server.cli", *shlex.split(command), "SERVING.md"]
    words = [str(ROOT / word) if word.startswith("benchmarks/") else word for word in words]
    done = subprocess.run(words, cwd=tmp_path, env=OURS, capture_output=True, text=True, timeout=280, check=True)
    assert "written to SERVING.md" in done.stderr, "the path of the trace in the command differs"
    planned = written.read_text().replace(str(ROOT) + "/", "")
    undated = re.compile(r"^Planned on \d{4}-\d\d-\d\d", re.MULTILINE)
    assert undated.sub("", planned) == undated.sub("", text("SERVING.md"))


@pytest.mark.parametrize("example", COMMANDS, ids=where)
def test_command_lines_are_understood(example: Example) -> None:
    words = shlex.split(example.text.split(" > ")[0], comments=True)[1:]
    words = [str(demo_model_path()) if word.startswith("/models/") else word for word in words]
    if words[0] == "serve":
        from quire_server.flags import parse_flags

        parse_flags(words[1:])
    elif words[0] == "engine":
        from quire_server.flags import ENGINE, parse_flags

        parse_flags(words[1:], ENGINE)
    elif words[0] == "run-batch":
        from quire_server.commands.run_batch import build_parser
        from quire_server.flags import parse_flags

        parse_flags(build_parser().parse_known_args(words[1:])[1])
    elif words[0] == "bench":
        from quire_bench.arguments import parse_arguments

        parse_arguments(words[1:])
    elif words[:2] == ["config", "from"]:
        assert words[2] in SERVERS  # tests/unit/server/settings/test_migration.py compares what is printed
    elif words[0] == "exercises" and "--mine" in words:
        from quire_lab.mine.command import build_parser as mine

        mine().parse_args(words[1:])
    elif words[0] == "exercises":
        assert re.fullmatch(r"exercises --url \S+( S\d\.\d)*", " ".join(words))
    else:
        from importlib import import_module

        from quire_server.commands import COMMANDS as MODULES
        from quire_server.flags import parse_flags

        own, served = words[1:], []
        if "--" in own:
            own, served = own[: own.index("--")], own[own.index("--") + 1 :]
        module = import_module(MODULES[words[0]][0])
        module.build_parser().parse_args(own)
        parse_flags(served)
