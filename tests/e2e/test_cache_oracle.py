"""A tenant that guesses another's prompts learns nothing from counts; `hostile.rows` has more guesses, and times."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import httpx
import pytest

from e2e.served import Served
from support.dialects import DIALECTS, cached_tokens, request_of

pytestmark = pytest.mark.e2e

SECRET = "The safe of ward seven opens with the code 4711, which the nurse on duty is to change before noon. " * 2
WRONG = SECRET.replace("4711", "4712")
LONG = " ".join(str(i) for i in range(400))  # still being computed when the next request comes
SALT = {"cache_salt": "a secret of one's own"}
HITS = "quire_prefix_cache_hit_tokens_total"
WARM = list(range(20, 84))  # computed before the first request


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    prefixes = tmp_path_factory.mktemp("warm") / "prefixes.jsonl"
    lines = ({"prompt": WARM, "for": "victim"}, {"prompt": WARM[:32]})
    prefixes.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with Served(
        *("--api-key", "victim=key-of-victim", "guesser=key-of-guesser", "early=key-of-early"),
        *("--set", "check_invariants=true", "--warm-prefix", str(prefixes)),
    ) as server:
        yield server


def asked(server: Served, dialect: str, text: str, who: str, **fields: object) -> int:
    """The cached tokens that the reply tells; the engine has counted as many."""
    before = server.metric(HITS)
    with httpx.Client(base_url=server.url, timeout=60) as http:
        told = cached_tokens(http.post(**request_of(dialect, text, f"key-of-{who}", **fields)))
    assert server.metric(HITS) - before == told
    return told


@pytest.mark.parametrize(("who", "tokens"), [("victim", 63), ("guesser", 32)])
def test_a_warm_prefix_is_found_by_the_first_request_of_whom_it_is_for(server: Served, who: str, tokens: int) -> None:
    body = {"prompt": WARM, "max_tokens": 1, "model": "quire-demo"}
    answer = httpx.post(server.url + "/v1/completions", json=body, headers={"x-api-key": f"key-of-{who}"}, timeout=60)
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == tokens


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("salt", [{}, SALT])
def test_a_right_guess_tells_as_much_as_a_wrong_one(server: Served, dialect: str, salt: dict[str, str]) -> None:
    """The guesser finds what its own requests have left, as one does that guesses before the victim has sent it."""
    secret, wrong = f"{dialect} {sorted(salt)} {SECRET}", f"{dialect} {sorted(salt)} {WRONG}"

    def guesses(who: str) -> list[int]:
        return [asked(server, dialect, text, who, **salt) for text in (wrong, secret, wrong, secret)]

    before = guesses("early")
    asked(server, dialect, secret, "victim", **salt)
    again = asked(server, dialect, secret, "victim", **salt)
    assert again == before[-1] > 40, "its own prefix is found"
    assert guesses("guesser") == before
    assert before[0] < 40


@pytest.mark.parametrize("dialect", ["completions", "chat", "messages"])
def test_a_prompt_in_flight_is_joined_by_its_own_tenant_alone(server: Served, dialect: str) -> None:
    async def together(text: str, *who: str) -> list[int]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            asking = [http.post(**request_of(dialect, text, f"key-of-{name}")) for name in who]
            return [cached_tokens(reply) for reply in await asyncio.gather(*asking)]

    own = asyncio.run(together(f"{dialect} one: {LONG}", "victim", "victim", "victim"))
    assert sum(count > 1000 for count in own) == 2, "of one tenant two join the one that computes"
    apart = asyncio.run(together(f"{dialect} two: {LONG}", "victim", "guesser"))
    assert max(apart) < 100


def test_a_stored_response_is_as_unknown_to_another_key_as_one_that_never_was(server: Served) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        known = http.post(**request_of("responses", SECRET, "key-of-victim", store=True)).json()["id"]
        made_up = known[:-4] + "".join("0" if c != "0" else "1" for c in known[-4:])
        refusals = []
        for name in (known, made_up):
            reply = http.post(**request_of("responses", "and?", "key-of-guesser", previous_response_id=name))
            read = http.get(f"/v1/responses/{name}", headers={"x-api-key": "key-of-guesser"})
            refusals.append((reply.status_code, read.status_code, (reply.text + read.text).replace(name, "ID")))
        assert refusals[0] == refusals[1]
        assert http.get(f"/v1/responses/{known}", headers={"x-api-key": "key-of-victim"}).status_code == 200
