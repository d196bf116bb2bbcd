"""A pool with a list of free blocks and a count of references for each one in use."""


class BlockPool:
    def __init__(self, num_blocks):
        self.free = list(range(num_blocks))
        self.refs = {}

    def take(self):
        if not self.free:
            return None
        block = self.free.pop()
        self.refs[block] = 1
        return block

    def share(self, block):
        self.refs[block] += 1

    def release(self, block):
        self.refs[block] -= 1
        if self.refs[block] == 0:
            del self.refs[block]
            self.free.append(block)

    def num_free(self):
        return len(self.free)
