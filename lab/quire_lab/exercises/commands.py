"""Exercises that commands of `quire` do: S1.4 and S3.2 by plan, S4.1 and S4.4 by bench, S4.5 by doctor, S4.6 by plan.

Promises: the commands run as a user runs them; what is compared is what they print or write.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire_bench.servers import BenchError
from quire_engine.own_modules import module_command
from quire_lab.exercises.own import OwnServers
from quire_lab.facts import memory
from quire_lab.facts.fact import Fact, equal, not_shown, renamed
from quire_lab.facts.live import Live

_PATIENCE = 300.0
_STREAMS = (1, 2, 4, 8)
_ROUNDS = 3
_OBJECTIVES = ("ttft_p95", "itl_p95")
_NUMBERS = ("268.4 MB", "262.1 MB", "2.147 GB")  # of 500 tokens in blocks of 16, as they are, and 4,096 reserved
_COST = "step=20ms,row=0.2ms,token=0.1ms"
_PLANNED = 24  # requests of the trace that is planned for

Done = subprocess.CompletedProcess[str]


def quire(*words: str) -> Done:
    """`quire WORDS`, whatever its exit code. Raises BenchError where it does not end."""
    command = module_command("quire_server.cli", *words)
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        raise BenchError(f"quire {words[0]} was not done after {_PATIENCE:g} s") from None


def memory_plan(live: Live, model: Path | None) -> list[Fact]:
    """S3.2: the documents' memory numbers, and bytes of the served model's blocks and pool."""
    shown = quire("plan", "--kv", "--shape", "32,32,128,2").stdout
    facts = [shows("S3.2 quire plan --kv, 32 layers, 500 tokens of 4,096", _NUMBERS, shown)]
    of_this_server = [*memory.reserved_and_live(live), *memory.bytes_of_a_block(live, model)]
    pool = live.debug("kv")["blocks"]["total"]
    blocks = equal("S3.2 blocks of /debug/kv", int(live.label("quire_cache_config_info", "num_blocks")), pool)
    return [*facts, blocks, *renamed("S3.2", of_this_server)]


def sharing_plan() -> list[Fact]:
    """S1.4: what `quire plan` says of 16 sessions with 200 tokens in common."""
    words = ("plan", "--kv", "--prefix", "200", "--sessions", "16")
    wanted = ("13 blocks shared", "208 separate", "195 saved")
    return [shows("S1.4 quire plan --kv --prefix 200 --sessions 16", wanted, quire(*words).stdout)]


def sweep(live: Live) -> list[Fact]:
    """S4.1: `quire bench` at rising concurrency has a table and the knee."""
    return swept(_bench(live, "--concurrency", ",".join(map(str, _STREAMS)), "--repeat", "1"))


def swept(results: Mapping[str, Any]) -> list[Fact]:
    """Whether every load was answered, and where more load stops bringing more."""
    rounds = [one for point in results["points"] for server in point["servers"] for one in server["rounds"]]
    knee = next(iter(results["knees"].values()), None)
    got = "none"
    if knee is not None:
        got = f"{knee['value']:g}, with {knee['throughput']:,.0f} tokens/s{'' if knee['reached'] else '; the last'}"
    return [
        equal(
            "S4.1 loads that were answered whole",
            len(_STREAMS),
            sum(one["ok"] > 0 for one in rounds if not one["errors"]),
        ),
        Fact(
            name="S4.1 streams from which more bring little more",
            expected=f"one of {', '.join(map(str, _STREAMS))}",
            got=got,
            ok=knee is not None and knee["value"] in _STREAMS,
        ),
    ]


def against_itself(live: Live, own: OwnServers) -> list[Fact]:
    """S4.4: `quire bench --against` gives both servers the same requests; of a server and itself the ratio is 1.

    Peers never get a key: where the given server asks for one, it is one of our own.
    """
    server = own.narrow() if live.api_key else live
    words = ("--against", f"{server.url},itself", "--concurrency", "4", "--repeat", str(_ROUNDS))
    return compared_with_itself(_bench(server, *words))


def compared_with_itself(results: Mapping[str, Any]) -> list[Fact]:
    """Whether both got the same requests, and the ratio of their throughputs.

    Rounds are so short here that a busy machine makes any ratio; what is wrong with the ratio shows in its rounds.
    """
    servers = [server for point in results["points"] for server in point["servers"]]
    tokens = [[one["output_tokens"] for one in server["rounds"]] for server in servers]
    name, ratios = "S4.4 tokens per second of a server over itself", [one["ratios"] for one in servers if one["ratios"]]
    same = Fact(
        name="S4.4 tokens of each round, by server",
        expected="the same",
        got="; ".join(", ".join(map(str, one)) for one in tokens),
        ok=len(tokens) == 2 and all(tokens) and tokens[0] == tokens[1],
    )
    if not ratios or "output_tok_s" not in ratios[0]:
        return [same, Fact(name=name, expected="0.5 to 2", got="none", ok=False)]
    got = ratios[0]["output_tok_s"]["median"]
    if not 0.5 <= got <= 2:
        return [same, not_shown(name, f"{got:.2f}: the machine did other work in some rounds")]
    return [same, Fact(name=name, expected="0.5 to 2", got=f"{got:.2f}", ok=True)]


def verdict(live: Live) -> list[Fact]:
    """S4.5: `quire doctor` judges every objective, and names a remedy where it is not content."""
    for _ in range(4):  # of a server that nobody has asked anything there is nothing to say
        live.complete(live.prompt(16), 8)
    key = ("--api-key", live.api_key) if live.api_key else ()
    done = quire("doctor", "--url", live.url, "--seconds", "2", "--since-start", *key)
    return [judged(done.returncode, done.stdout, done.stderr)]


def judged(code: int, out: str, err: str) -> Fact:
    """Return the verdict on each objective as a fact; an objective without data has no verdict."""
    said = {name: match[1] for name in _OBJECTIVES if (match := re.search(rf"{name}\b.*\b(ok|MISSED)\b", out))}
    causes = len(re.findall(r"^\s*remedy: ", out, re.MULTILINE))
    words = [f"{name} {verdict}" for name, verdict in said.items()] or [err.strip()[-90:] or "no objective"]
    content = all(word == "ok" for word in said.values()) and not causes
    return Fact(
        name="S4.5 quire doctor",
        expected=f"ok or MISSED of {' and '.join(_OBJECTIVES)}, exit code by that",
        got=f"{', '.join(words)}; {causes} causes with remedies; exit code {code}",
        ok=len(said) == len(_OBJECTIVES) and code == (0 if content else 1),
    )


def plan_written_twice() -> list[Fact]:
    """S4.6: a plan that says the same as the file does leaves the file as it is, and everything beside it alone."""
    with tempfile.TemporaryDirectory(prefix="quire-plan-") as folder:
        trace, written = Path(folder) / "trace.jsonl", Path(folder) / "SERVING.md"
        rows = [{"at": 0.25 * i, "input_tokens": 32 + 8 * (i % 5), "output_tokens": 16} for i in range(_PLANNED)]
        trace.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        written.write_text("# Ours\n\nOf which nothing is planned.\n", encoding="utf-8")
        words = ("plan", "--slo", "ttft_p95=1s", "--trace", str(trace), "--cost", _COST, "--candidates", "2")
        texts = []
        for _ in range(2):
            done = quire(*words, "--write", str(written))
            if done.returncode:
                raise BenchError(f"quire plan ended with {done.returncode}: {done.stderr.strip()[-120:]}")
            texts.append(written.read_text(encoding="utf-8"))
    return [written_alike(texts)]


def written_alike(texts: Sequence[str]) -> Fact:
    """The file after the first plan, and after the second."""
    first, second = (text.splitlines() for text in texts)
    different = abs(len(first) - len(second)) + sum(one != other for one, other in zip(first, second, strict=False))
    section = "## Planned settings" in first
    return Fact(
        name="S4.6 lines that quire plan --write changes the second time",
        expected="0 of a file with its section",
        got=f"{different} of a file {'with' if section else 'without'} its section",
        ok=section and not different,
    )


def shows(name: str, wanted: Sequence[str], text: str) -> Fact:
    """Whether a command has printed all of it."""
    missing = [each for each in wanted if each not in text]
    got = f"all but {', '.join(missing)}" if missing else ", ".join(wanted)
    return Fact(name=name, expected=", ".join(wanted), got=got, ok=not missing)


def _bench(live: Live, *words: str) -> dict[str, Any]:
    """Run a small `quire bench --json` and return what it writes. Raises BenchError where it writes nothing."""
    key = ("--api-key", live.api_key) if live.api_key else ()
    small = ("--input", "32", "--output", "16", "--no-probe")
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        written = Path(folder) / "results.json"
        done = quire("bench", "--url", f"{live.url},server", *words, *small, *key, "--json", str(written))
        if not written.exists():
            raise BenchError(f"quire bench ended with {done.returncode}: {done.stderr.strip()[-120:]}")
        results: dict[str, Any] = json.loads(written.read_bytes())
        return results
