"""Facts on the KV cache's memory and its limits: F9, F10, F19.

Promises: arithmetic that is done here from a model's config, beside what the server says.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from quire_engine.own_modules import module_command
from quire_lab.facts.fact import Fact, NotShown, equal
from quire_lab.facts.live import Live

_PATIENCE = 300.0
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def kv_bytes(*, layers: int, heads: int, head_dim: int, tokens: int, item: int = 2) -> int:
    """Keys and values of so many tokens.

    >>> kv_bytes(layers=1, heads=32, head_dim=128, tokens=4096) // 2**20
    64
    >>> kv_bytes(layers=32, heads=8, head_dim=128, tokens=16)
    2097152
    """
    return 2 * layers * heads * head_dim * tokens * item


def reserved_and_live(live: Live) -> list[Fact]:
    """F9: 4,096 reserved tokens against 512 live ones are 8 : 1; the pool's bytes are its blocks'."""
    layer = kv_bytes(layers=1, heads=32, head_dim=128, tokens=4096)
    whole, paged = 32 * layer, kv_bytes(layers=32, heads=32, head_dim=128, tokens=512)
    blocks = int(live.label("quire_cache_config_info", "num_blocks"))
    per_block = int(live.label("quire_cache_config_info", "bytes_per_block"))
    return [
        equal("F9 MiB of a layer at 4,096 tokens", 64, layer / 2**20),
        equal("F9 GiB reserved, 32 layers", 2, whole / 2**30),
        equal("F9 reserved over live at 512 tokens", 8, whole / paged),
        equal("F9 bytes of the server's KV blocks", live.metric("quire_memory_bytes", kind="kv"), blocks * per_block),
        equal("F9 the same by state", blocks * per_block, live.metric("quire_kv_bytes")),
    ]


def bytes_of_a_block(live: Live, model: Path | None) -> list[Fact]:
    """F10: a block's bytes follow from the model's config."""
    facts = [
        equal(
            "F10 bytes of 16 tokens, 32 layers of 8 heads",
            2_097_152,
            kv_bytes(layers=32, heads=8, head_dim=128, tokens=16),
        )
    ]
    if model is None:
        return facts
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    item = _BYTES[live.label("quire_model_info", "dtype")]
    wanted = kv_bytes(
        layers=config["num_hidden_layers"], heads=heads, head_dim=head_dim, tokens=live.block_size, item=item
    )
    told = int(live.label("quire_cache_config_info", "bytes_per_block"))
    return [*facts, equal("F10 bytes of a block of this model", wanted, told)]


def limits_are_checked(live: Live) -> list[Fact]:
    """F19: block sizes that no kernel has and chunks of nothing are refused, and the reason is said."""
    refused = {"block_size": "--set block_size=17", "prefill_chunk": "--prefill-chunk 0"}
    facts = [
        Fact(
            name="F19 block size that serves",
            expected="16 or 32, or what the kernels ask for",
            got=str(live.block_size),
            ok=live.block_size % 16 == 0,
        )
    ]
    for name, words in refused.items():
        command = module_command("quire_server.cli", "serve", "--dry-run", *words.split())
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE)
        except subprocess.TimeoutExpired:
            raise NotShown(f"quire serve --dry-run {words} was not done after {_PATIENCE:g} s") from None
        said = done.stderr.strip().splitlines()[-1:] or [""]
        facts.append(
            Fact(
                name=f"F19 {words}",
                expected="refused, with the setting's name",
                got=said[0][-90:],
                ok=done.returncode == 2 and name in done.stderr.replace("-", "_"),
            )
        )
    return facts
