"""A serving loop of one's own in sixty lines: continuous batching over a paged pool, by the model's forward alone.

With `--against URL` the rate of a running server for the same requests is printed beside its own.
"""

import sys
from itertools import accumulate
from time import perf_counter

import torch
from tokenizers import Tokenizer

from quire_engine.demo import demo_model_path
from quire_engine.execution.kv.kv_storage import KVStorage
from quire_engine.execution.model_input import ModelInput
from quire_engine.execution.models.config import load_model_config
from quire_engine.execution.models.weights import load_decoder
from quire_kernels.kernel_set import KVFormat
from quire_kernels.select import select

BLOCK, NUM_BLOCKS, SEATS, BUDGET = 16, 64, 3, 48  # tokens a block, blocks, sequences at once, tokens a step
PATH, DEVICE, DTYPE = demo_model_path(), torch.device("cpu"), torch.float32

config = load_model_config(PATH)
kernels = select(DEVICE, DTYPE, "reference", kv=KVFormat(head_dim=config.head_dim, block_size=BLOCK))
decoder = load_decoder(PATH, config, kernels=kernels, dtype=DTYPE, device=DEVICE, max_model_len=512)
pool, free = KVStorage(kernels, config, NUM_BLOCKS, BLOCK, DTYPE, DEVICE), list(range(NUM_BLOCKS))


def step(slices):
    """The next token of each slice (ids, start, size, table), all computed in one forward."""
    sizes = [size for _, _, size, _ in slices]
    ends = [start + size for _, start, size, _ in slices]
    ids = [token for ids, start, size, _ in slices for token in ids[start : start + size]]
    positions = [p for _, start, size, _ in slices for p in range(start, start + size)]
    slots = [t[p // BLOCK] * BLOCK + p % BLOCK for _, start, n, t in slices for p in range(start, start + n)]
    starts, width = torch.tensor([0, *accumulate(sizes)], dtype=torch.int32), max(len(table) for *_, table in slices)
    rows = ModelInput(
        input_ids=torch.tensor(ids), positions=torch.tensor(positions), kv_slots=torch.tensor(slots),
        query_starts=starts, context_lens=torch.tensor(ends, dtype=torch.int32),
        block_tables=torch.tensor([t + [0] * (width - len(t)) for *_, t in slices], dtype=torch.int32),
        query_lens=tuple(sizes), kv_lens=tuple(ends), max_query_len=max(sizes), max_context_len=max(ends),
        sample_rows=torch.arange(len(ids)), sampled=None,
    )  # fmt: skip
    logits = decoder.logits(decoder.forward(rows, pool.tensor))
    return logits[starts[1:].long() - 1].argmax(-1).tolist()


def serve(prompts, max_tokens):
    """Every prompt's continuation: a request that ends makes room for one that waits, between two steps."""
    waiting, running, done = dict(enumerate(prompts)), {}, {}
    while waiting or running:
        while waiting and len(running) < SEATS:  # a request enters with blocks for all that it may become
            name = next(iter(waiting))
            ids = list(waiting.pop(name))
            running[name] = (ids, len(ids), [free.pop() for _ in range(-(-(len(ids) + max_tokens) // BLOCK))], [0])
        budget, slices = BUDGET - len(running), {}
        for name, (ids, _, table, computed) in running.items():  # a token for each, the rest for prompts, in chunks
            size = min(len(ids) - computed[0], budget + 1)
            slices[name] = (ids, computed[0], size, table)
            budget -= size - 1
        for (name, (ids, start, size, _)), token in zip(slices.items(), step([*slices.values()]), strict=True):
            running[name][3][0] = start + size
            if start + size == len(ids):  # the last known token is computed: its row gives the next one
                ids.append(token)
            if len(ids) == running[name][1] + max_tokens:
                done[name] = ids[running[name][1] :]
                free.extend(running.pop(name)[2])
    return [done[name] for name in range(len(prompts))]


if __name__ == "__main__":
    tokenizer = Tokenizer.from_file(str(PATH / "tokenizer.json"))
    texts = ["Once upon a time", "The capital of France is", "A shy princess", "One spring day, Tom planted a seed"]
    prompts, began = [tokenizer.encode(text).ids for text in texts], perf_counter()
    replies = serve(prompts, 12)
    rate = sum(map(len, replies)) / (perf_counter() - began)
    for text, ids in zip(texts, replies, strict=True):
        print(f"{text}{tokenizer.decode(ids)}")
    print(f"{rate:,.0f} output tokens a second")
    if len(sys.argv) == 3 and sys.argv[1] == "--against":  # a server such as vLLM gets the same requests
        from quire_bench.peer_rate import Job, Peer, peer_rate

        other = peer_rate(
            Peer.parse(sys.argv[2]), [Job(prompt=ids, output_tokens=12) for ids in prompts], streams=SEATS
        )
        print(f"{other.name}: {other.tokens_per_second:,.0f}, so this is {rate / other.tokens_per_second:.2f}x")
