"""First come, first served, in chunks; blocks are taken as they are needed, and the youngest gives its own up."""


class Request:
    def __init__(self, num_prompt):
        self.known = num_prompt
        self.computed = 0
        self.blocks = []


class Scheduler:
    def __init__(self, num_blocks, block_size, max_num_seqs, max_num_batched_tokens):
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.free = list(range(num_blocks))
        self.waiting = {}
        self.running = {}

    def add(self, request_id, num_prompt_tokens, max_new_tokens):
        self.waiting[request_id] = Request(num_prompt_tokens)

    def ended(self, request_id):
        self.free += self.running.pop(request_id).blocks

    def num_free(self):
        return len(self.free)

    def schedule(self):
        budget = self.max_num_batched_tokens
        sizes, preempted = {}, []
        decodes_first = sorted(
            self.running, key=lambda name: self.running[name].known - self.running[name].computed > 1
        )
        for name in decodes_first:
            if name not in self.running or budget == 0:
                continue
            size = min(budget, self.running[name].known - self.running[name].computed)
            if self.grow(name, size, sizes, preempted):
                sizes[name] = size
                budget -= size
        while self.waiting and not preempted and budget > 0 and len(self.running) < self.max_num_seqs:
            name, request = next(iter(self.waiting.items()))
            size = min(budget, request.known)
            if self.needs(request, size) > len(self.free):
                break
            del self.waiting[name]
            self.running[name] = request
            self.grow(name, size, sizes, preempted)
            sizes[name] = size
            budget -= size
        slices = [(name, size, list(self.running[name].blocks)) for name, size in sizes.items()]
        for name, size in sizes.items():
            request = self.running[name]
            request.computed += size
            if request.computed == request.known:
                request.known += 1
        return slices, preempted

    def needs(self, request, size):
        return -(-(request.computed + size) // self.block_size) - len(request.blocks)

    def grow(self, name, size, sizes, preempted):
        request = self.running[name]
        while self.needs(request, size) > len(self.free):
            victim = [other for other in self.running if other not in sizes][-1]
            self.preempt(victim, preempted)
            if victim == name:
                return False
        for _ in range(self.needs(request, size)):
            request.blocks.append(self.free.pop(0))
        return True

    def preempt(self, name, preempted):
        request = self.running.pop(name)
        self.free += request.blocks
        request.blocks, request.computed = [], 0
        self.waiting = {name: request, **self.waiting}
        preempted.append(name)
