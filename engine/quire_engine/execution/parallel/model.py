"""A model that several ranks compute: as rank 0 drives it, and as the others follow.

Promises: every rank calls the same ops with the same rows. Every `CHECK_STEPS` steps digests of all messages and of the
step's hidden states are compared; where they differ, or a rank is gone, all end. Must not know: processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor

from quire_engine.execution.kv.kv_storage import KVBlocks, Pairs
from quire_engine.execution.model_input import ModelInput
from quire_engine.execution.models.served import ModelFacts, ServedModel
from quire_engine.execution.parallel.messages import Kind, Message, decode, step_of, told_step
from quire_kernels.kernel_set import AdaptedOps, AdapterSites, ChoiceRows
from quire_kernels.ranks import Collective, RankLost, computed_by_all

CHECK_STEPS = 256  # from one comparison to the next
_DIGEST_BYTES = 16


class Agreement:
    """Compares what all ranks have got and computed."""

    def __init__(self, collective: Collective, every: int = CHECK_STEPS) -> None:
        self._collective, self._every = collective, every
        self._digest = blake2b(digest_size=_DIGEST_BYTES)
        self._steps = 0

    def told(self, data: bytes) -> None:
        self._digest.update(data)

    def computed(self, hidden: Tensor) -> None:
        """A step's hidden states are there. Raises RankLost where the ranks differ."""
        self._steps += 1
        if self._steps % self._every:
            return
        if hidden.numel():
            self._digest.update(hidden.contiguous().view(torch.uint8).numpy().tobytes())
        rank, size = self._collective.rank, self._collective.size
        all_digests = torch.zeros(1, size * _DIGEST_BYTES, dtype=torch.uint8)
        places = [_DIGEST_BYTES * each for each in range(size + 1)]
        own = slice(places[rank], places[rank + 1])
        all_digests[0, own] = torch.frombuffer(bytearray(self._digest.digest()), dtype=torch.uint8)
        self._collective.gather(all_digests, places)
        of_ranks = all_digests.view(size, _DIGEST_BYTES)
        differing = [each for each in range(size) if not torch.equal(of_ranks[each], of_ranks[rank])]
        if differing:
            raise RankLost(f"after step {self._steps} the ranks {rank} and {differing[0]} differ in tables or rows")


class Leader:
    """See `ServedModel`: rank 0's, which tells the others what it is about to compute."""

    def __init__(
        self,
        decoder: ServedModel,
        collective: Collective,
        adapted: AdaptedOps | None = None,
        *,
        shares_pools: bool = False,
        has_states: bool = False,
        check_every: int = CHECK_STEPS,
    ) -> None:
        """`adapted`: of the kernels, for steps whose rows have adapters.

        `shares_pools`: this process reads and writes all ranks' pools between steps, so that each step and each copy
        ends with all ranks at rest. `has_states`: the model keeps a state of its own for each sequence.
        """
        self._decoder, self._collective, self._adapted = decoder, collective, adapted
        self._shares_pools, self._has_states = shares_pools, has_states
        self._agreement = Agreement(collective, check_every)
        self._numbers: WeakKeyDictionary[AdapterSites, int] = WeakKeyDictionary()  # of adapters that all ranks have
        self._next_number = 0
        self._dropped: list[int] = []  # of those that this rank has no more

    @property
    def config(self) -> ModelFacts:
        return self._decoder.config

    @property
    def chains_decodes(self) -> bool:
        return False

    @property
    def packed_bytes(self) -> int | None:
        return self._decoder.packed_bytes

    def forward(self, step: ModelInput, kv: Tensor) -> Tensor:
        numbers = [] if step.adapters is None else [self._number_of(each) for each in step.adapters.adapters]
        with self._with_others(told_step(step, numbers, has_states=self._has_states)):
            hidden = self._decoder.forward(step, kv)
            self._agreement.computed(hidden)
            self._rest()
        return hidden

    def normed(self, hidden: Tensor) -> Tensor:
        return self._decoder.normed(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        with self._with_others(Message(Kind.LOGITS, (hidden,))):
            return self._decoder.logits(hidden)

    def greedy(self, hidden: Tensor, allowed: Tensor | None = None) -> tuple[list[int], list[bool]] | None:
        tensors = (hidden,) if allowed is None else (hidden, allowed)
        with self._with_others(Message(Kind.GREEDY, tensors)):
            return self._decoder.greedy(hidden, allowed)

    def choose(self, logits: Tensor, rows: ChoiceRows) -> tuple[Tensor, Tensor, Tensor]:
        return self._decoder.choose(logits, rows)

    def waited(self) -> tuple[float, ...]:
        """See `Collective.waited`."""
        return self._collective.waited()

    def copy_blocks(self, pairs: Pairs) -> None:
        """Tell the others of a copy that this rank is about to make in its pool."""
        self._tell(Message(Kind.COPY, (torch.tensor(pairs),)))
        self._rest()

    def end(self) -> None:
        """The others are needed no more."""
        self._tell(Message(Kind.END))

    def _number_of(self, adapter: AdapterSites) -> int:
        """Return the number by which the other ranks know an adapter; they are given it if they do not have it."""
        number = self._numbers.get(adapter)
        if number is None:
            if self._adapted is None or self._adapted.told is None:
                raise ValueError("a step has an adapter, and the kernels divide none among ranks")
            if self._dropped:
                self._tell(Message(Kind.FORGET, (torch.tensor(self._dropped),)))
                self._dropped.clear()
            number, self._next_number = self._next_number, self._next_number + 1
            self._tell(Message(Kind.ADAPTER, (torch.tensor([number]), *self._adapted.told(adapter))))
            self._numbers[adapter] = number
            finalize(adapter, self._dropped.append, number)
        return number

    def _rest(self) -> None:
        if self._shares_pools:
            rest(self._collective)

    def _tell(self, message: Message) -> None:
        data = message.encode()
        self._agreement.told(data)
        self._collective.broadcast(data)

    @contextmanager
    def _with_others(self, message: Message) -> Iterator[None]:
        with computed_by_all("a step that the others compute"):
            self._tell(message)
            yield


@torch.inference_mode()
def follow(
    decoder: ServedModel,
    kv: KVBlocks,
    collective: Collective,
    adapted: AdaptedOps | None = None,
    *,
    shares_pools: bool = False,
    check_every: int = CHECK_STEPS,
) -> None:
    """Compute what rank 0 tells until it ends. `shares_pools`: as rank 0 has it.

    Raises RankLost, and what the model raises.
    """
    agreement, adapters = Agreement(collective, check_every), dict[int, AdapterSites]()
    while True:
        data = collective.broadcast(None)
        agreement.told(data)
        message = decode(data)
        match message.kind:
            case Kind.END:
                return
            case Kind.STEP:
                agreement.computed(decoder.forward(step_of(message, adapters), kv.tensor))
            case Kind.LOGITS:
                decoder.logits(message.tensors[0])
            case Kind.GREEDY:
                decoder.greedy(*_both(message.tensors))
            case Kind.COPY:
                kv.copy_blocks([(source, target) for source, target in message.tensors[0].tolist()])
            case Kind.ADAPTER:
                assert adapted is not None
                assert adapted.restored is not None
                adapters[int(message.tensors[0])] = adapted.restored(message.tensors[1:])
            case Kind.FORGET:
                for number in message.tensors[0].tolist():
                    del adapters[number]
        if shares_pools and message.kind in {Kind.STEP, Kind.COPY}:
            rest(collective)


def rest(collective: Collective) -> None:
    """Wait until all ranks are here: what they have written until then is in memory. Raises RankLost."""
    collective.gather(torch.zeros(1, collective.size, dtype=torch.uint8), range(collective.size + 1))


def _both(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    return tensors[0], tensors[1] if len(tensors) > 1 else None
