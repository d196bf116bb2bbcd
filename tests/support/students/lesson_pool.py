"""The pool and the page table of a lesson: `alloc()` and `free(block)`, references, a counter of copies on write."""


class OutOfBlocks(Exception):
    pass


class BlockPool:
    def __init__(self, num_blocks, block_size=16):
        self.block_size = block_size
        self.free_list = list(range(num_blocks))
        self.ref_count = [0] * num_blocks
        self.cow_copies = 0

    def alloc(self):
        if not self.free_list:
            raise OutOfBlocks("no block is free")
        block = self.free_list.pop()
        self.ref_count[block] = 1
        return block

    def share(self, block):
        self.ref_count[block] += 1

    def free(self, block):
        if self.ref_count[block] == 0:
            raise ValueError(f"block {block} is free")
        self.ref_count[block] -= 1
        if self.ref_count[block] == 0:
            self.free_list.append(block)

    def copy_on_write(self, block):
        if self.ref_count[block] == 1:
            return block
        self.ref_count[block] -= 1
        self.cow_copies += 1
        return self.alloc()


class PageTable:
    def __init__(self, block_size):
        self.block_size = block_size
        self.blocks = []

    def append(self, block):
        self.blocks.append(block)

    def position_to_block(self, position):
        return self.blocks[position // self.block_size], position % self.block_size
