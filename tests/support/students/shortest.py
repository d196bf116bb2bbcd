"""The shortest request enters first, but whoever has waited for forty steps goes before all others."""

from dataclasses import dataclass, field
from typing import NamedTuple


class Slice(NamedTuple):
    request_id: str
    num_tokens: int
    blocks: list


@dataclass
class Waiting:
    prompt: int
    most: int
    since: int
    blocks: list = field(default_factory=list)
    done: int = 0
    known: int = 0


class Scheduler:
    def __init__(self, num_blocks, block_size, max_num_seqs, max_num_batched_tokens):
        self.size, self.seats, self.most = block_size, max_num_seqs, max_num_batched_tokens
        self.pool = set(range(num_blocks))
        self.step = 0
        self.queue, self.live = {}, {}

    def num_free(self):
        return len(self.pool)

    def add(self, request_id, num_prompt_tokens, max_new_tokens):
        self.queue[request_id] = Waiting(num_prompt_tokens, max_new_tokens, self.step, known=num_prompt_tokens)

    def ended(self, request_id):
        self.pool |= set(self.live.pop(request_id).blocks)

    def schedule(self):
        self.step += 1
        for name in sorted(self.queue, key=self.turn):
            one = self.queue[name]
            needed = -(-(one.prompt + one.most - 1) // self.size)
            if len(self.live) == self.seats or needed > len(self.pool):
                break
            one.blocks = [self.pool.pop() for _ in range(needed)]
            self.live[name] = self.queue.pop(name)
        slices, left = [], self.most
        for name in sorted(self.live, key=lambda name: self.live[name].known - self.live[name].done > 1):
            one = self.live[name]
            count = min(left, one.known - one.done)
            if count:
                slices.append(Slice(name, count, one.blocks))
                left -= count
                one.done += count
                one.known += one.done == one.known
        return slices, ()

    def turn(self, name):
        one = self.queue[name]
        is_old = self.step - one.since > 40
        return (not is_old, one.since if is_old else one.prompt + one.most)
