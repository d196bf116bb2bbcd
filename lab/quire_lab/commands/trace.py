"""`quire trace`: shows the scheduler's steps of a running server, with the reason of each decision.

Promises: changes nothing in the server; steps come in order, once, and a gap is reported; each decision ends with its
rule. Exit code 0, 1 where the server does not answer, 2 for flags that cannot work. Must not know: the engine.
"""

from __future__ import annotations

import argparse
import http.client
import json
import ssl
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TextIO
from urllib.parse import urlencode

from quire_engine.contract.errors import ConfigError
from quire_server.commands.health import connection, listening
from quire_server.settings.keys import sent_key
from quire_server.settings.sources import admin_key_of_environment

DONE, FAILED, BAD_USAGE = 0, 1, 2
PAGE = 256  # steps in one answer
POLL_SECONDS = 0.5
TIMEOUT = 15.0  # seconds for an answer, which the engine gives between two steps
_KEY_HINT = " Give this command the server's admin key: --admin-api-key KEY or QUIRE_ADMIN_API_KEY."
_SHOWN = 8  # characters of a request's id
_MOST_HOLDERS = 3  # requests named as holders of blocks
_WAITS = {
    "kv": ("its prompt needs more free blocks than there are", "capacity: the whole prompt, or nothing"),
    "slots": ("as many sequences run as may", "--max-num-seqs"),
    "budget": ("the step's tokens are given, or enough others are in the middle of their prompts", "step budget"),
    "prefix": ("another request computes the beginning that both have", "shared prefix"),
}
_PREEMPTIONS = {
    "blocks": ("a running request grows and finds no free block", "victim policy"),
    "elder": ("the elder needs blocks or a slot", "elder rule"),
    "class": ("a higher class needs what it had", "service classes"),
    "share": ("its tenant held more than its share, which another one claims", "fair queueing"),
    "device": ("the device had no memory to compute it", "starved"),
}


class TraceError(Exception):
    """The server cannot be read; one line for the user."""


class StepPages(Protocol):
    """A step log: a server's, or in tests a scheduler's."""

    def page(self, after: int, *, events: bool) -> dict[str, Any]:
        """Steps after one of them. Raises TraceError."""
        ...


class Source:
    """The step log of one server."""

    def __init__(self, address: str, key: str, *, insecure: bool = False) -> None:
        self._address = address
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._tls = None if insecure else ssl.create_default_context()

    def page(self, after: int, *, events: bool) -> dict[str, Any]:
        """Steps after one of them. Raises TraceError."""
        link = connection(self._address, TIMEOUT, self._tls)
        try:
            query = urlencode({"after": after, "limit": PAGE, "events": str(events).lower()})
            link.request("GET", f"/debug/steps?{query}", headers=self._headers)
            reply = link.getresponse()
            body = json.loads(reply.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise TraceError(f"{self._address} does not answer: {error or type(error).__name__}") from None
        finally:
            link.close()
        if reply.status != http.client.OK:
            hint = _KEY_HINT if reply.status in {http.client.UNAUTHORIZED, http.client.FORBIDDEN} else ""
            raise TraceError(f"{self._address}: {body['error']['message']}{hint}")
        page: dict[str, Any] = body
        return page


def run(argv: Sequence[str]) -> int:
    """Print the log; the process's exit code."""
    given = build_parser().parse_args(argv)
    addresses = [given.url] if given.url else sorted(listening())
    if len(addresses) != 1:
        found = f"several servers listen here: {', '.join(addresses)}" if addresses else "no server listens here"
        print(f"quire trace: {found}; name one with --url", file=sys.stderr)
        return BAD_USAGE
    try:
        key = sent_key(given.admin_api_key or admin_key_of_environment(), "--admin-api-key")
    except ConfigError as error:
        print(f"quire trace: {error}", file=sys.stderr)
        return BAD_USAGE
    source = Source(addresses[0], key, insecure=given.insecure)
    tell = Lines(sys.stdout) if given.json else Story(sys.stdout)
    try:
        for page in pages(source, given.after, events=given.json, follow=given.follow):
            tell.page(page)
            sys.stdout.flush()
    except TraceError as error:
        print(f"quire trace: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        pass
    return DONE


def pages(source: StepPages, after: int, *, events: bool, follow: bool) -> Iterator[dict[str, Any]]:
    """Pages of applied steps; `missed` and `restarted` report gaps."""
    while True:
        page = source.page(after, events=events)
        page["restarted"] = page["last"] < after
        if page["restarted"]:
            after = 0
            page = source.page(after, events=events) | {"restarted": True}
        page["missed"] = max(0, page["first"] - after - 1) if page["steps"] else 0
        full = len(page["steps"]) == PAGE
        known = [step for step in page["steps"] if step["applied_at"] is not None or not step["slices"]]
        # In order: with two steps in flight the later one is never applied before the earlier one.
        page["steps"] = known
        if known:
            after = known[-1]["step_id"]
            # Events after the last step come with the next step, if there will be one.
            last = after if follow or full else after + 1
            page["events"] = [event for event in page.get("events", ()) if event["after_step"] < last]
            yield page
        if not full:
            if not follow:
                return
            time.sleep(POLL_SECONDS)


class Story:
    """The writer of steps as text for people."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._since: float | None = None

    def page(self, page: dict[str, Any]) -> None:
        if page["restarted"]:
            print("the engine has been restarted; its steps begin anew", file=self._out)
        if page["missed"]:
            print(f"... {page['missed']} steps are not remembered any more ...", file=self._out)
        for step in page["steps"]:
            if self._since is None:
                self._since = step["planned_at"]
            for line in narrate(step, since=self._since):
                print(line, file=self._out)


class Lines:
    """The writer of steps as lines for a replay, in the format of `scheduling.step_records`."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_begun = False

    def page(self, page: dict[str, Any]) -> None:
        if not self._is_begun or page["restarted"] or page["missed"]:
            self._is_begun = True
            first = page["steps"][0]["step_id"]
            told = {name: page[name] for name in ("format", "config", "restored_blocks")}
            self._line({"kind": "config", **told, "first_step": first})
        steps = [{"kind": "step", **step} for step in page["steps"]]
        for line in sorted([*steps, *page["events"]], key=lambda each: int(each["ordinal"])):
            self._line(line)

    def _line(self, value: dict[str, Any]) -> None:
        print(json.dumps(value, separators=(",", ":")), file=self._out)


def narrate(step: dict[str, Any], *, since: float) -> Iterator[str]:
    """The lines of one step; `since` is the engine's time that counts as zero."""
    slices = step["slices"]
    took = f"{step['seconds'] * 1000:.1f} ms" if step["applied_at"] is not None else "not computed yet"
    yield (
        f"step {step['step_id']}  +{step['planned_at'] - since:.3f} s  {took if slices else 'nothing to compute'}"
        f"  {step['prefill_tokens']} prompt + {step['decode_tokens']} decode tokens"
        f"  running {step['running']}  waiting {step['waiting']}  blocks {step['blocks_used']}"
    )
    for decision in step["decisions"]:
        yield f"  {_decision(decision, holders(slices))}"
    for source, target in step["copies"]:
        yield f"  copy       block {source} to {target}: two sequences go on in it differently  [copy on write]"
    if any(step.get("swaps", ())):
        out, back = step["swaps"]
        yield f"  swaps      {out} blocks to the host, {back} from it  [swap space]"
    if waits := step.get("rank_seconds"):
        told = ", ".join(f"{seconds * 1000:.1f}" for seconds in waits)
        yield f"  ranks      waited {told} ms for the others  [gathers]"
    behind = {(request_id, choice) for request_id, choice, *_ in step.get("drafts", ())}
    for request_id, choice, start, size in slices:
        if size > 1 and (request_id, choice) not in behind:
            yield f"  computes   {_name(request_id, choice)} tokens {start} to {start + size - 1}  [chunk]"
    if guessed := step.get("drafts"):
        tokens, right = sum(each[2] for each in guessed), sum(each[3] for each in guessed)
        yield f"  guesses    {tokens} tokens behind {len(guessed)} of the decodes, {right} were right  [speculation]"
    num_single = sum(1 for each in slices if each[3] == 1) + len(behind)
    if num_single:
        yield f"  decodes    {num_single} {'sequence' if num_single == 1 else 'sequences'}, a token each  [no stall]"
    for request_id in step["starved"]:
        yield f"  preempted  {_name(request_id)}: {_PREEMPTIONS['device'][0]}  [starved]"
    for request_id, choice, why, said in step["ends"]:
        yield f"  ends       {_name(request_id, choice)} after {said} tokens  [{why}]"


def holders(slices: Sequence[Sequence[Any]]) -> list[str]:
    """The requests of a step with the largest contexts, as they are shown: so much of the KV cache is theirs."""
    contexts: dict[str, int] = {}
    for request_id, _, start, size in slices:
        contexts[request_id] = contexts.get(request_id, 0) + start + size
    largest = sorted(contexts.items(), key=lambda one: -one[1])[:_MOST_HOLDERS]
    return [f"{_name(request_id)} ({tokens:,} tokens)" for request_id, tokens in largest]


def _decision(decision: dict[str, Any], held_by: Sequence[str]) -> str:
    name, reason = _name(decision["request_id"]), decision["reason"]
    match decision["kind"]:
        case "elder":
            return f"elder      {name} is served first until it ends: overdue, or the longest here  [elder rule]"
        case "enters":
            cached = decision["num_tokens"]
            found = f", {cached} of its tokens are cached" if cached else ""
            return f"enters     {name}: a slot, blocks and tokens are there{found}  [admission]"
        case "waits":
            why, rule = _WAITS.get(reason, (reason, "queue"))
            held = f", held by {', '.join(held_by)}" if reason == "kv" and held_by else ""
            return f"waits      {name}: {why}{held}  [{rule}]"
        case "preempted":
            why, rule = _PREEMPTIONS.get(reason, (reason, "preemption"))
            kept = f", {decision['num_tokens']} computed tokens are kept" if decision["num_tokens"] else ""
            taker = f", for {_name(decision['by'])}" if decision.get("by") else ""
            return f"preempted  {name}: {why}{taker}{kept}  [{rule}]"
    return f"{decision['kind']:<10} {name}: {reason}  [{decision['kind']}]"


def _name(request_id: str, choice: int = 0) -> str:
    return request_id[:_SHOWN] + (f"/{choice}" if choice else "")


def build_parser() -> argparse.ArgumentParser:
    """The command\'s own flags."""
    parser = argparse.ArgumentParser(
        prog="quire trace", description="Tell what a running server's scheduler does in each step, and why."
    )
    parser.add_argument("--url", help="of the server, or its Unix socket; default: the one that runs here")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--annotate", action="store_true", help="in words, with the rule behind each decision [default]")
    kind.add_argument("--json", action="store_true", help="JSON lines that a replay can read")
    parser.add_argument("--follow", action="store_true", help="go on as long as the server runs")
    parser.add_argument("--after", type=int, default=0, metavar="STEP", help="begin behind this step [0]")
    parser.add_argument(
        "--admin-api-key", default="", metavar="KEY", help="of the server, where it has one; or QUIRE_ADMIN_API_KEY"
    )
    parser.add_argument("--insecure", action="store_true", help="take any certificate of an HTTPS server")
    return parser
