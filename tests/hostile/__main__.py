"""Sends a server of its own everything that hostile clients send, one by one, and says what came of it: `make hostile`.

Promises: after each request the server answers as before, or it is said; exit code 1 where a promise was broken.
`--kind NAME` sends the requests of one class, `--count` prints how many there are. Must not know: what is sent.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator

import httpx

from e2e.served import Served
from hostile import report
from hostile.case import Case, exchange
from hostile.corpus import access, fields, framing, prompts, texts, values
from hostile.corpus.facts import KEY, MARK, Facts
from hostile.verdict import GROWN_BYTES, Verdict, judge
from hostile.watch import Watch

CORPUS = (access, texts, framing, values, prompts, fields)
HEADER_TIMEOUT = 2.0
FLAGS = ("--max-num-seqs", "8", "--max-num-queued-reqs", "32", "--set", "check_invariants=true")
LIMITS = f"header_timeout={HEADER_TIMEOUT},body_timeout=10"
ATTEMPTS = 3
NOISE_SECONDS = 0.05  # where who measures was late himself, an attempt says little
SETTLE_SECONDS = 3.0
SAID_EVERY = 100
_NUMBER = re.compile(r"larger than (\d+) bytes")


def cases(facts: Facts) -> Iterator[Case]:
    for part in CORPUS:
        yield from part.cases(facts)


async def facts_of(url: str, trap: int, *, thorough: bool = False) -> Facts:
    """What the server says of itself, and how large a body it takes."""
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as http:
        model = (await http.get("/v1/models")).json()["data"][0]
        info = (await http.get("/tokenizer_info")).json()
        document = (await http.get("/openapi.json")).json()
    address = httpx.URL(url)
    announced = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %b\r\n" % KEY.encode()
    announced += b"Content-Type: application/json\r\nContent-Length: 1000000000000000\r\n\r\n{"
    asked = Case(kind="", name="", path="/tokenize", parts=lambda: (announced,))
    limit = _NUMBER.search((await exchange(address.host, address.port or 80, asked)).body.decode())
    if limit is None:
        raise LookupError("the server does not tell its largest body")
    return Facts(
        document=document,
        model=model["id"],
        vocab_size=info["vocab_size"],
        special_tokens=tuple(value for value in info.values() if isinstance(value, str) and value.startswith("<")),
        max_model_len=model["max_model_len"],
        max_body_bytes=int(limit[1]),
        header_timeout=HEADER_TIMEOUT,
        trap=trap,
        thorough=thorough,
    )


class Attack:
    """One run against one server."""

    def __init__(self, server: Served, wanted: argparse.Namespace) -> None:
        self._server = server
        self._wanted = wanted
        self._attempts: int = wanted.attempts
        self._address = httpx.URL(server.url)
        self.verdicts: list[Verdict] = []
        self.broken: list[str] = []  # what no single request did

    async def run(self) -> None:
        called: list[object] = []
        trap = await asyncio.start_server(lambda reader, writer: called.append(writer.close()), "127.0.0.1", 0)
        facts = await facts_of(self._server.url, trap.sockets[0].getsockname()[1], thorough=self._wanted.thorough)
        headers = {"Authorization": f"Bearer {KEY}"}
        pid, streams = self._server.process.pid, self._wanted.streams
        async with Watch(self._server.url, pid=pid, headers=headers, streams=streams) as watch:
            print(f"nothing is sent: {await watch.seen()}", flush=True)
            for case in cases(facts):
                if case.kind in (self._wanted.kind or [case.kind]) and case.kind not in self._wanted.without:
                    self.verdicts.append(await self._attempt(case, watch))
                    self._tell_progress()
            await asyncio.sleep(SETTLE_SECONDS)
            seen = await watch.seen()
            print(f"when all was over: {seen}", flush=True)
            if seen.grown > GROWN_BYTES:
                self.broken.append(f"the process has grown by {seen.grown >> 20} MiB")
        trap.close()
        if called:
            self.broken.append(f"the server called {len(called)} times where a request told it to")
        self.broken += self._in_the_log()
        try:
            await asyncio.to_thread(self._server.wait_idle, 5.0)
        except AssertionError as error:
            self.broken.append(str(error))

    async def _attempt(self, case: Case, watch: Watch) -> Verdict:
        """Times are taken again where they are too long; the best attempt counts, as the worst may be the machine's."""
        attempts: list[Verdict] = []
        while True:
            answer = await exchange(self._address.host, self._address.port or 80, case)
            attempts.append(judge(case, answer, *await watch.after()))
            is_noise = attempts[-1].seen.late > NOISE_SECONDS and len(attempts) < 3 * self._attempts
            if attempts[-1].faults or not attempts[-1].late or not (is_noise or len(attempts) < self._attempts):
                break
        if attempts[-1].faults:
            return attempts[-1]
        return min(attempts, key=lambda each: (len(each.late), each.seen.stall + each.seen.beyond))

    def _in_the_log(self) -> Iterator[str]:
        log = self._server.log()
        for text, what in (("Traceback", "tracebacks"), (KEY, "the key"), (MARK, "the text of prompts")):
            if count := log.count(text):
                where = log.index(text)
                yield f"the log shows {what} {count} times: ...{log[max(0, where - 200) : where + 1500]}"

    def _tell_progress(self) -> None:
        if len(self.verdicts) % SAID_EVERY == 0:
            broken = sum(not verdict.is_kept for verdict in self.verdicts)
            print(f"{len(self.verdicts)} sent, {broken} broke a promise", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="hostile", description=__doc__)
    parser.add_argument("--kind", action="append", default=[], help="only the requests of this class; more than once")
    parser.add_argument("--without", action="append", default=[], help="all but this class; more than once")
    parser.add_argument("--streams", type=int, default=2, help="of others, beside; 0 where only answers are looked at")
    parser.add_argument("--count", action="store_true", help="print how many there are of each class")
    parser.add_argument("--flag", action="append", default=[], help="of `quire serve`, such as --flag=--max-num-seqs=4")
    parser.add_argument("--attempts", type=int, default=ATTEMPTS, help="at a time that was too long, the best counts")
    parser.add_argument("--thorough", action="store_true", help="every value in every field: more than twice as many")
    parser.add_argument("--log", help="file that gets the server's log")
    wanted = parser.parse_args()
    started = time.monotonic()
    with Served(*FLAGS, "--api-key", KEY, "--admin-api-key", f"{KEY}-admin", *wanted.flag, limits=LIMITS) as server:
        if wanted.count:
            counts = Counter(
                case.kind for case in cases(asyncio.run(facts_of(server.url, 9, thorough=wanted.thorough)))
            )
            print("\n".join(f"{count:>6} {kind}" for kind, count in counts.items()), f"\n{counts.total():>6} in all")
            return 0
        attack = Attack(server, wanted)
        try:
            asyncio.run(attack.run())
        finally:
            if wanted.log:
                with open(wanted.log, "w", encoding="utf-8") as file:
                    file.write(server.log())
            print("\n".join(report.lines(attack.verdicts, time.monotonic() - started)), flush=True)
    for fault in attack.broken:
        print(f"BROKEN: {fault}")
    is_kept = not attack.broken and all(verdict.is_kept for verdict in attack.verdicts)
    print("every promise was kept" if is_kept else "promises were broken", flush=True)
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
