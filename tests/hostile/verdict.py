"""What is promised of a server that hostile requests are sent to, and which of it one request has broken.

Promises: each broken promise is one line with its figure; times are told apart from the rest, as a busy machine breaks
them too. Must not know: how requests are sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from hostile import hygiene
from hostile.case import Answer, Case
from hostile.watch import Seen

LOOP_SECONDS = 0.1  # the event loop may be held
BEYOND_SECONDS = 0.25  # another's stream may be silent longer than usual
LIVE_SECONDS = 0.25  # /health/live may take
GROWN_BYTES = 192 << 20  # the process may have grown when all is over
_ERROR = 400


@dataclass(slots=True, kw_only=True)
class Verdict:
    """One case and what came of it."""

    case: Case
    status: int
    seconds: float
    seen: Seen
    faults: list[str] = field(default_factory=list)  # what is wrong however slow the machine is
    late: list[str] = field(default_factory=list)  # what took too long

    @property
    def is_kept(self) -> bool:
        return not self.faults and not self.late


def judge(case: Case, answer: Answer, canary: Iterable[str], seen: Seen) -> Verdict:
    """The promises, in the order in which an operator would ask for them."""
    verdict = Verdict(case=case, status=answer.status, seconds=answer.seconds, seen=seen)
    verdict.faults += [f"afterwards {fault}" for fault in canary]
    verdict.faults += _faults(case, answer)
    if seen.live_failures:
        verdict.faults.append(f"/health/live failed {seen.live_failures} times")
    if seen.broken or seen.changed:
        verdict.faults.append(f"of others' streams {seen.broken} broke off and {seen.changed} changed")
    for name, took, most in (
        ("the event loop was held", seen.stall, LOOP_SECONDS),
        ("another's stream was silent beyond the usual", seen.beyond, BEYOND_SECONDS),
        ("/health/live took", seen.live, LIVE_SECONDS),
    ):
        if took > most:
            verdict.late.append(f"{name} {took * 1000:.0f} ms")
    return verdict


def _faults(case: Case, answer: Answer) -> Iterator[str]:
    if answer.hung:
        yield f"no answer within {case.patience:g} s"
        return
    if answer.status not in case.expected:
        wanted = " or ".join(str(status) if status else "a close" for status in sorted(case.expected))
        said = answer.body[:160].decode("utf-8", "replace")
        yield f"{answer.status or 'closed without an answer'}, not {wanted}: {said}"
    if answer.status >= _ERROR:
        yield from hygiene.faults(answer, path=case.path, sent=case.quotes, secrets=case.secrets)
    if case.check is not None and answer.status:
        try:
            wrong = case.check(answer)
        except ValueError as error:
            wrong = f"the answer cannot be read: {error}"
        if wrong is not None:
            yield wrong
