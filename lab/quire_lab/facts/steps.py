"""Facts on single steps and tables, from the server's own log of them: F3, F4, F6, F7.

Promises: only steps of the requests that are made here count. What needs requests to run beside each other is not shown
where they came apart.
"""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial
from uuid import uuid4

from quire_bench.servers import BenchError
from quire_lab.facts.fact import Fact, Try, equal, tried
from quire_lab.facts.live import Live
from quire_lab.facts.logs import apart, recorded

LENGTHS = (10, 50, 100, 200)
_PROMPT = 4
_LONG_STEPS = 4  # that the long prompt should take
_MOST = 256  # steps a reply has
_PATIENCE = 120.0  # seconds for a first token

Slice = tuple[str, int, int, int]  # request, choice, start, tokens


def finish_steps(live: Live) -> list[Fact]:
    """F3, F4: four requests that come together leave after 10, 50, 100 and 200 steps, 360 slots in all for 800."""
    return tried(partial(_four, live))


def _four(live: Live) -> Try:
    begin = live.last_step()
    # The longest first, so that all overlap, however late the last is sent.
    live.together([partial(live.complete, live.prompt(_PROMPT), length) for length in sorted(LENGTHS, reverse=True)])
    steps = _steps_after(live, begin)
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    counts = Counter[str]()
    for number, slices in steps:
        for request, _, _, _ in slices:
            first.setdefault(request, number)
            last[request] = number
            counts[request] += 1
    took = sorted(last[request] - first[request] + 1 for request in last)
    leaving = Fact(
        name="F3 steps from entering to leaving",
        expected=", ".join(map(str, LENGTHS)),
        got=", ".join(map(str, took)),
        ok=took == list(LENGTHS),
    )
    most = max((len(slices) for _, slices in steps), default=0)
    return Try(
        certain=(
            leaving,
            equal("F3 token-steps that were useful", sum(LENGTHS), sum(counts.values())),
            equal("F3 token-steps of a static batch", 800, len(LENGTHS) * max(LENGTHS)),
        ),
        others=(equal("F4 most sequences in a step", len(LENGTHS), most),),
        missing=apart(recorded(live, begin), len(LENGTHS)),
    )


def chunks_of_a_prompt(live: Live) -> list[Fact]:
    """F6: a long prompt takes as many steps as it has chunks, and a stream beside it gets a token in each of them."""
    chunk = _chunk(live)
    length = min(_LONG_STEPS * chunk, (live.max_model_len - 8) // chunk * chunk)
    begin = live.last_step()
    live.complete(live.prompt(length), 1)
    alone = [slices for _, slices in _steps_after(live, begin)]
    steps = equal(f"F6 steps of a prompt of {length} tokens, chunks of {chunk}", length / chunk, len(alone))
    return [steps, *tried(partial(_beside_a_stream, live, length))]


def _beside_a_stream(live: Live, length: int) -> Try:
    begin, began = live.last_step(), threading.Event()
    stream = threading.Thread(target=live.stream, args=(live.prompt(_PROMPT), live.max_model_len - 8, began))
    stream.start()
    began.wait(_PATIENCE)
    live.complete(live.prompt(length), 1)
    stream.join()
    beside = [slices for _, slices in _steps_after(live, begin)]
    longest = Counter(one[0] for slices in beside for one in slices if one[3] > _PROMPT).most_common(1)[0][0]
    long_steps = [place for place, slices in enumerate(beside) if any(one[0] == longest for one in slices)]
    last_of_stream = max(
        (place for place, slices in enumerate(beside) if {one[0] for one in slices} != {longest}), default=-1
    )
    over = last_of_stream < long_steps[-1]
    return Try(
        others=(
            equal(
                "F6 of its steps beside a stream, those without the stream's token",
                0,
                sum(len(beside[place]) < 2 for place in long_steps),
            ),
        ),
        missing="the stream was over before the prompt was computed" if over else "",
    )


def place_of_a_token(live: Live) -> list[Fact]:
    """F7: position p lies in block p // B of the table, at offset p % B."""
    return tried(partial(_place_in_a_live_table, live))


def _place_in_a_live_table(live: Live) -> Try:
    name, began = f"fact-{uuid4().hex}", threading.Event()
    answer = min(live.max_model_len - 64, 1024)
    stream = threading.Thread(target=live.stream, args=(live.prompt(60), answer, began, name))
    stream.start()
    began.wait(_PATIENCE)
    try:
        told = live.debug(f"kv/{name}?pos=37")["sequences"][0]
        whole = live.debug(f"kv/{name}")["sequences"][0]
    except BenchError as error:
        over = not stream.is_alive()  # what has ended has no table
        table = Fact(name="F7 table of a stream", expected="its blocks", got=str(error)[:100], ok=False)
        return Try(others=(table,), missing="the stream was over before the table was asked for" if over else "")
    finally:
        stream.join()
    index, offset = divmod(37, live.block_size)
    return Try(
        certain=(
            equal("F7 block of position 37", index, told["block_index"]),
            equal("F7 offset of position 37", offset, told["offset"]),
            equal("F7 its physical block, by the table", whole["blocks"][index], told["block"]),
        )
    )


def _chunk(live: Live) -> int:
    """The largest slice of a prompt that has the server to itself."""
    begin = live.last_step()
    live.complete(live.prompt(live.max_model_len - 8), 1)
    return max(one[3] for _, slices in _steps_after(live, begin) for one in slices)


def _steps_after(live: Live, step: int) -> list[tuple[int, list[Slice]]]:
    """The steps after one that computed something, by their numbers."""
    found: list[tuple[int, list[Slice]]] = []
    while True:
        told = live.debug(f"steps?after={step}&limit={_MOST}")["steps"]
        if not told:
            return found
        found += [(each["step_id"], each["slices"]) for each in told if each["slices"]]
        step = told[-1]["step_id"]
