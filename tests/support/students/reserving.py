"""A request enters when the pool has room for its whole length, and is never preempted."""

from collections import deque


class Scheduler:
    def __init__(self, *, num_blocks, block_size, max_num_seqs, max_num_batched_tokens):
        self.size, self.seats, self.budget = block_size, max_num_seqs, max_num_batched_tokens
        self.free = deque(range(num_blocks))
        self.queue = deque()
        self.live = {}

    @property
    def num_free(self):
        return len(self.free)

    def add(self, request_id, num_prompt_tokens, max_new_tokens):
        self.queue.append((request_id, num_prompt_tokens, max_new_tokens))

    def ended(self, request_id):
        self.free.extend(self.live.pop(request_id)["blocks"])

    def schedule(self):
        while self.queue and len(self.live) < self.seats:
            name, prompt, most = self.queue[0]
            blocks = -(-(prompt + most - 1) // self.size)
            if blocks > len(self.free):
                break
            self.queue.popleft()
            self.live[name] = {"left": prompt, "blocks": [self.free.popleft() for _ in range(blocks)]}
        budget, slices = self.budget, []
        for name, one in sorted(self.live.items(), key=lambda item: item[1]["left"] != 1):
            count = min(budget, one["left"])
            if count:
                slices.append((name, count, one["blocks"]))
                budget -= count
                one["left"] = one["left"] - count or 1
        return slices, []
