"""A runner without a model: tokens are a hash of the tokens before them, and KV slots remember what was written.

Promises: the same tokens for a request however it is batched, chunked, shared, preempted or resumed; any read of a slot
that does not hold what its position needs raises. Must not know: torch, the scheduler's internals.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from quire_engine.contract.batch import PENDING, POOLED_BITS, Batch, SampledToken, ScheduledSequence, StepResult
from quire_engine.contract.types import (
    NON_FINITE,
    BeamParams,
    GenerationRequest,
    SamplingParams,
    StopParams,
    TokenLogprobs,
    TokenOutput,
)
from quire_engine.scheduling.scheduler import Scheduler
from support.fake_model import VOCAB_SIZE, extend, sample, told
from support.limits import scheduler_config


class CorruptKV(AssertionError):
    """A sequence would have attended to a slot that holds something else."""


def request(
    request_id: str = "r",
    prompt: int | tuple[int, ...] = 8,
    max_tokens: int = 4,
    *,
    n: int = 1,
    stop: tuple[int, ...] = (),
    priority: int = 0,
    salt: str = "",
    arrival: float = 0.0,
    beam: BeamParams | None = None,
    prompt_logprobs: int | None = None,
    penalty: float = 1.0,  # with one the batch carries the output, for the executor to check the blocks against
    resumed: tuple[tuple[int, ...], ...] = (),
    finished: tuple[int, ...] = (),
) -> GenerationRequest:
    """A request; an int as `prompt` is a length and gives tokens that only this request id has."""
    tokens = prompt if isinstance(prompt, tuple) else own_tokens(request_id, prompt)
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=tokens,
        # A search has no penalty, and its batches carry the output anyway.
        sampling=SamplingParams(num_prompt_logprobs=prompt_logprobs, presence_penalty=penalty if beam is None else 0.0),
        stop=StopParams(max_new_tokens=max_tokens, stop_token_ids=stop),
        n=n,
        priority=priority,
        cache_salt=salt,
        arrival_time=arrival,
        resumed_token_ids=resumed,
        finished_choices=finished,
        beam=beam,
    )


def own_tokens(name: str, length: int) -> tuple[int, ...]:
    """Tokens that depend on the name; two names almost surely share no first block."""
    seed = sum((i + 1) * ord(c) for i, c in enumerate(name))
    return tuple((seed * 7919 + position * 104729) % VOCAB_SIZE for position in range(length))


def expected_tokens(wanted: GenerationRequest, choice: int) -> tuple[int, ...]:
    """What the choice must produce, computed without any scheduler."""
    chain = 0
    for token_id in wanted.prompt_token_ids:
        chain = extend(chain, token_id)
    tokens: list[int] = []
    while len(tokens) < wanted.stop.max_new_tokens:
        tokens.append(sample(chain, choice))
        if tokens[-1] in wanted.stop.stop_token_ids:
            break
        chain = extend(chain, tokens[-1])
    return tuple(tokens)


def expected_embedding(wanted: GenerationRequest) -> tuple[float, ...] | None:
    """The vector that the request must get, computed without any scheduler."""
    chain, chains = 0, []
    for token_id in wanted.prompt_token_ids:
        chain = extend(chain, token_id)
        chains.append(chain)
    match wanted.pooling:
        case "last":
            return (chain / (1 << POOLED_BITS),)
        case "mean":
            return (sum(chains) / (len(chains) << POOLED_BITS),)
    return None


class FakeExecutor:
    """Executes batches against a pretended KV pool: slot (block, offset) holds the hash of all tokens up to there.

    Each group of layers has slots of its own, and reads those that its window lets it see.
    """

    def __init__(self, block_size: int, *, max_in_flight: int = 1, windows: tuple[int | None, ...] = (None,)) -> None:
        self.max_in_flight = max_in_flight
        self._windows = windows
        self.log: list[Batch] = []  # all that were launched
        self._launched: deque[Batch] = deque()  # computed when they are collected: as late as can be
        self._sampled: dict[int, int] = {}  # by sequence id, in the last step
        self._block_size = block_size
        self.slots: dict[tuple[int, int], int] = {}  # content by block and offset
        self._host: dict[int, list[int | None]] = {}  # the slots of each block of the host's pool
        self._chains: dict[int, list[int]] = {}  # per sequence: hash of its first 0, 1, 2, ... tokens
        self.errors: dict[int, str] = {}  # by sequence id: fails the sequence's next slice
        self._void: set[tuple[int, int]] = set()  # runs of sequences; of requests, where it is their prompt
        self.starved: set[int] = set()  # sequence ids: there is no memory for their next slice
        self.non_finite: set[int] = set()  # sequence ids: their next row holds a value that is not finite
        self.num_copies = 0
        self.forgotten: list[int] = []  # blocks of the host
        self.pieces = 0  # of work to prepare
        self.rank_seconds: tuple[float, ...] = ()  # of each step

    def launch(self, batch: Batch) -> None:
        self.log.append(batch)
        self._launched.append(batch)
        assert len(self._launched) <= self.max_in_flight

    def forget_host_blocks(self, blocks: Sequence[int]) -> None:
        self.forgotten += blocks

    def prepare(self) -> int:
        self.pieces = max(0, self.pieces - 1)
        return self.pieces

    def collect(self) -> StepResult:
        return self.execute(self._launched.popleft())

    def execute(self, batch: Batch) -> StepResult:
        batch = replace(batch.whole(), items=tuple(self._known(item) for item in batch.items))
        self.copy(batch)
        starved_now = {i.sequence_id for i in batch.items if i.sequence_id in self.starved}
        result = StepResult(starved=starved_now, rank_seconds=self.rank_seconds)
        self.starved -= result.starved
        # What was planned behind a slice that is not computed is computed on anything, and must be passed over.
        starved = [item for item in batch.items if item.sequence_id in result.starved]
        void = [item for item in batch.items if self._void & {_run(item), _request_run(item)} and item not in starved]
        items = [item for item in batch.items if item not in starved and item not in void]
        self._void = {_request_run(item) if item.start < item.num_prompt_tokens else _run(item) for item in starved}
        for item in void:
            self._spoil(item, result)
        for item in items:
            self._write(item)
        for item in items:
            if item.sequence_id in self.errors:
                result.errors[item.sequence_id] = self.errors.pop(item.sequence_id)
                continue
            self._read(item)
            chain = self._chain(item)
            if item.wants_prompt_logprobs:
                result.prompt_logprobs[item.sequence_id] = tuple(
                    TokenLogprobs(token_id=item.prompt_token_ids[p + 1], logprob=-float(p + 1), rank=1)
                    for p in range(item.start, min(item.end, item.num_prompt_tokens - 1))
                )
            if item.pooling:
                rows = (
                    chain[item.start + 1 : item.end + 1] if item.pooling == "mean" else chain[item.end : item.end + 1]
                )
                result.pooled[item.sequence_id] = (sum(rows),)
            if item.wants_sample:
                for sequence_id, choice in [
                    (item.sequence_id, item.choice),
                    *((fork.sequence_id, fork.choice) for fork in item.forks),
                ]:
                    token_id = sample(chain[item.end], choice)
                    scores = told(token_id, chain[item.end], item.sampling.num_logprobs)
                    result.samples[sequence_id] = (SampledToken(token_id=token_id, logprobs=scores),)
                    if sequence_id in self.non_finite:
                        self.non_finite.discard(sequence_id)
                        result.non_finite.add(sequence_id)
                        result.samples[sequence_id] = (SampledToken(error=NON_FINITE),)
        self._sampled = {sequence_id: samples[0].token_id for sequence_id, samples in result.samples.items()}
        return result

    def _spoil(self, item: ScheduledSequence, result: StepResult) -> None:
        for position in range(item.start, item.end):
            for slot in self._slots_of(item, position):
                self.slots.pop(slot, None)
        if item.wants_prompt_logprobs:
            result.prompt_logprobs[item.sequence_id] = ()
        if item.pooling:
            result.pooled[item.sequence_id] = (0,)
        if item.wants_sample:
            ids = (item.sequence_id, *(fork.sequence_id for fork in item.forks))
            result.samples.update(dict.fromkeys(ids, (SampledToken(token_id=0),)))

    def copy(self, batch: Batch) -> None:
        """The blocks that are copied before the step's first write; a GPU copies all at once."""
        sources, targets = {source for source, _ in batch.copies}, [target for _, target in batch.copies]
        assert sources.isdisjoint(targets), "a block is read and written by the same step's copies"
        assert len(set(targets)) == len(targets), "two copies have one target"
        for source, target in batch.swap_out:
            self._host[target] = [self.slots.get((source, offset)) for offset in range(self._block_size)]
        for source, target in batch.swap_in:
            for offset, held in enumerate(self._host[source]):
                self.slots.pop((target, offset), None)
                if held is not None:
                    self.slots[target, offset] = held
        for source, target in batch.copies:
            self.num_copies += 1
            for offset in range(self._block_size):
                self.slots.pop((target, offset), None)
                if (source, offset) in self.slots:
                    self.slots[target, offset] = self.slots[source, offset]

    def _known(self, item: ScheduledSequence) -> ScheduledSequence:
        """With the tokens that were PENDING at its launch. Of a sequence whose last step failed they are anything."""
        if PENDING not in item.token_ids:
            return item
        assert item.token_ids == (PENDING,), "only a decode may wait for its token"
        token = self._sampled.get(item.sequence_id, 0)
        return replace(item, token_ids=(token,))

    def _chain(self, item: ScheduledSequence) -> list[int]:
        chain = self._chains.setdefault(item.sequence_id, [0])
        # What an earlier run made of it may be void; a beam may have been given another one's past.
        del chain[1 if item.sampling.num_logprobs is not None else item.start + 1 :]
        for position in range(len(chain) - 1, item.end):
            if item.start > position >= item.num_prompt_tokens and not item.output_token_ids:
                # The batch does not tell this token, and a later run has computed less than the one whose blocks are
                # found again. What follows from them shows whether they were right.
                chain.append(self.slots[self._slots_of(item, position)[0]])
            else:
                chain.append(extend(chain[-1], _at(item, position)))
        return chain

    def _slots_of(self, item: ScheduledSequence, position: int) -> list[tuple[int, int]]:
        """Return the position's slot in each group of layers."""
        index, offset = divmod(position, self._block_size)
        return [(blocks[index], offset) for blocks in (item.block_ids, *item.other_block_ids)]

    def _write(self, item: ScheduledSequence) -> None:
        chain = self._chain(item)
        for position in range(item.start, item.end):
            if position < item.num_prompt_tokens or item.output_token_ids:
                assert item.token_ids[position - item.start] == _at(item, position)
            for group, slot in enumerate(self._slots_of(item, position)):
                self.slots[slot] = _content(chain[position + 1], group)

    def _read(self, item: ScheduledSequence) -> None:
        """Compare whole lists, since every step reads all that its sequences have."""
        chain = self._chain(item)
        tables = (item.block_ids, *item.other_block_ids)
        for group, (blocks, window) in enumerate(zip(tables, self._windows, strict=True)):
            first = 0 if window is None else max(0, item.start - window + 1)
            skipped = first // self._block_size
            seen = blocks[skipped : -(-item.end // self._block_size)]
            slots = [(block, offset) for block in seen for offset in range(self._block_size)]
            begin = skipped * self._block_size
            held = list(map(self.slots.get, slots[first - begin : item.end - begin]))
            wanted = chain[first + 1 : item.end + 1]
            if group:
                wanted = [_content(each, group) for each in wanted]
            if held != wanted:
                same = [one == other for one, other in zip(held, wanted, strict=False)]
                position = first + (same.index(False) if False in same else len(same))
                raise CorruptKV(f"sequence {item.sequence_id}, position {position} of {item.end}, group {group}")


def _content(chain: int, group: int) -> int:
    """What a slot holds: no two groups the same."""
    return chain if group == 0 else (chain, group).__hash__()


def _run(item: ScheduledSequence) -> tuple[int, int]:
    return item.sequence_id, item.run


def _request_run(item: ScheduledSequence) -> tuple[int, int]:
    """Which request, by the one object that its prompt is, and which of its runs."""
    return id(item.prompt_token_ids), item.run


def _at(item: ScheduledSequence, position: int) -> int:
    if position >= item.start:
        return item.token_ids[position - item.start]
    behind_prompt = position - item.num_prompt_tokens
    return item.prompt_token_ids[position] if behind_prompt < 0 else item.output_token_ids[behind_prompt]


DEAR = 2.0  # seconds of a token beside the second of a step: more than a seat is worth in a small pool


@dataclass
class Run:
    """A scheduler and an executor that step together, with everything that came out."""

    scheduler: Scheduler
    executor: FakeExecutor
    check: bool = True  # invariants after every step
    seconds_per_token: float = 0.0  # beside the second of every step
    step: int = 0
    now: float = 0.0
    log: list[Batch] = field(default_factory=list)
    outputs: list[TokenOutput] = field(default_factory=list)
    finish_step: dict[str, int] = field(default_factory=dict)  # of the request's last choice
    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    finishes: dict[tuple[str, int], TokenOutput] = field(default_factory=dict)

    def add(self, *requests: GenerationRequest) -> None:
        for wanted in requests:
            self.scheduler.add(wanted, self.now)

    def one_step(self) -> Batch | None:
        """Schedule, execute, apply; the clock is the step number unless tokens take time."""
        batch = self.scheduler.schedule(self.now)
        if batch is None:
            return None
        self.step += 1
        self.now += 1.0 + self.seconds_per_token * batch.num_tokens
        self.log.append(batch)
        self.take(self.scheduler.apply(batch, self.executor.execute(batch), self.now))
        if self.check:
            self.scheduler.check_invariants()
        return batch

    def take(self, outputs: list[TokenOutput]) -> None:
        """Collect outputs; a choice that says anything after its end fails the test."""
        for output in outputs:
            key = (output.request_id, output.choice)
            assert key not in self.finishes, f"{key} spoke after its end"
            self.tokens.setdefault(key, []).extend(output.token_ids)
            if output.finish is not None:
                self.finishes[key] = output
                self.finish_step[output.request_id] = self.step
        self.outputs += outputs

    def to_end(self, limit: int = 100_000) -> None:
        """Step until nothing is left."""
        while self.scheduler.has_work:
            assert self.step < limit, "it does not end"
            self.one_step()


def new_run(check: bool = True, seconds_per_token: float = 0.0, **limits: object) -> Run:
    """A run over a small scheduler; `limits` are as in `scheduler_config`. Its steps take a second, which is no ITL."""
    config = scheduler_config(**{"num_blocks": 256, "max_num_batched_tokens": 512, "itl_target": 0.0, **limits})
    executor = FakeExecutor(config.limits.block_size)
    return Run(scheduler=Scheduler(config), executor=executor, check=check, seconds_per_token=seconds_per_token)


def outputs_of(run: Run, name: str, choice: int = 0) -> list[TokenOutput]:
    """What one choice of a request said, in order."""
    return [o for o in run.outputs if (o.request_id, o.choice) == (name, choice)]


def produced_alone(run: Run, *wanted: GenerationRequest) -> bool:
    """Every choice has exactly the tokens that it would have alone."""
    return all(
        tuple(run.tokens[one.request_id, choice]) == expected_tokens(one, choice)
        for one in wanted
        for choice in range(one.n)
    )
