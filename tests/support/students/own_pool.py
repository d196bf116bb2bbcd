"""A pool and a scheduler over it: the lowest free block first; who has computed the fewest tokens gives up its own."""

import heapq


class BlockPool:
    def __init__(self, num_blocks):
        self.heap = list(range(num_blocks))
        self.refs = [0] * num_blocks

    @property
    def num_free(self):
        return len(self.heap)

    def take(self):
        if not self.heap:
            return None
        block = heapq.heappop(self.heap)
        self.refs[block] = 1
        return block

    def share(self, block):
        if self.refs[block] == 0:
            raise ValueError(f"block {block} is free")
        self.refs[block] += 1

    def release(self, block):
        if self.refs[block] == 0:
            raise ValueError(f"block {block} is free")
        self.refs[block] -= 1
        if self.refs[block] == 0:
            heapq.heappush(self.heap, block)


class Scheduler:
    def __init__(self, num_blocks, block_size, max_num_seqs, max_num_batched_tokens):
        self.pool = BlockPool(num_blocks)
        self.block_size, self.seats, self.budget = block_size, max_num_seqs, max_num_batched_tokens
        self.order = []  # requests in the order of arrival
        self.state = {}

    def num_free(self):
        return self.pool.num_free

    def add(self, request_id, num_prompt_tokens, max_new_tokens):
        self.order.append(request_id)
        self.state[request_id] = [num_prompt_tokens, 0, []]  # known, computed, blocks

    def ended(self, request_id):
        self.order.remove(request_id)
        self.drop(self.state.pop(request_id))

    def drop(self, state):
        while state[2]:
            self.pool.release(state[2].pop())
        state[1] = 0

    def schedule(self):
        preempted, slices, left = [], [], self.budget
        oldest = self.order[0]

        def victims(name):
            others = [one for one in self.order if self.state[one][2] and one not in (name, oldest)]
            return [one for one in others if one not in [done for done, _, _ in slices]]

        def serve(name, may_preempt):
            nonlocal left
            known, computed, blocks = self.state[name]
            count = min(left, known - computed)
            while len(blocks) * self.block_size < computed + count:
                block = self.pool.take()
                if block is None and may_preempt and victims(name):
                    gives = min(victims(name), key=lambda one: self.state[one][1])
                    self.drop(self.state[gives])
                    preempted.append(gives)
                elif block is None:
                    if computed:
                        preempted.append(name)
                    self.drop(self.state[name])
                    return
                else:
                    blocks.append(block)
            slices.append((name, count, list(blocks)))
            left -= count

        running = [name for name in self.order if self.state[name][1]]
        for name in sorted(running, key=lambda name: (name != oldest, self.state[name][0] - self.state[name][1] > 1)):
            if name not in preempted and left:
                if name == oldest and self.state[name][0] - self.state[name][1] > 1:
                    left -= len(running) - 1  # the decodes of the others come first
                    if left > 0:
                        serve(name, may_preempt=True)
                    left += len(running) - 1
                else:
                    serve(name, may_preempt=True)
        for name in self.order:
            held = sum(1 for one in self.order if self.state[one][2])
            if not self.state[name][1] and name not in preempted and left > 0 and held < self.seats:
                if preempted and name != oldest:
                    continue
                serve(name, may_preempt=name == oldest)
        for name, count, _ in slices:
            self.state[name][1] += count
            if self.state[name][1] == self.state[name][0]:
                self.state[name][0] += 1
        return slices, preempted
