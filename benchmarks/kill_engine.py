"""Kills the engine under streams, and holds what they get against the same streams undisturbed.

    python benchmarks/kill_engine.py [MODEL] [--scale 0.1] [--kills 3] [--most-seconds 1] [-- flags of quire serve]

Without MODEL a checkpoint of random weights is made in the shape of Llama 3.1 8B, at a scale of it (`make_big.py`). The
exit status is 0 if every stream is identical and no next token took longer than that.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from hashlib import sha256
from pathlib import Path

from big_start import Server, streams

_FLAGS = ["--quantization", "int4", "--max-model-len", "1024"]
_WARM_SECONDS = 16.0  # until a process waits with its libraries loaded to be the next engine


def shown(text: str) -> str:
    """A stream's tokens in a few words."""
    ids = text.strip("[]").split(", ")
    digest = sha256(text.encode()).hexdigest()[:12]
    return f"{len(ids)} tokens, {', '.join(ids[:3])}, ... {', '.join(ids[-3:])}, digest {digest}"


def run(model: Path, given: argparse.Namespace, flags: list[str], cache: Path) -> bool:
    """Whether all went as it should."""
    is_right = True
    with Server(model, cache, flags) as server:
        print(f"ready after {server.seconds:.1f} s", flush=True)
        expected, _, usual = asyncio.run(streams(server, given.streams, given.tokens, kill=False))
        print(f"{given.streams} streams undisturbed: longest gap {usual:.2f} s", flush=True)
        for number in range(given.kills):
            time.sleep(_WARM_SECONDS)
            asked = {"kill": True, "after": given.after}
            got, stall, usual = asyncio.run(streams(server, given.streams, given.tokens, **asked))
            for index, (one, other) in enumerate(zip(expected, got, strict=True)):
                same = "identical" if one == other else "DIFFERENT"
                print(f"  stream {index}: expected {shown(one)}\n            got      {shown(other)}: {same}")
            in_time = stall <= given.most_seconds
            is_right = is_right and got == expected and in_time
            print(
                f"kill {number + 1}: next token {stall:.2f} s after it ({'' if in_time else 'NOT '}within"
                f" {given.most_seconds:g} s); before it at most {usual:.2f} s apart",
                flush=True,
            )
        for line in server.log().splitlines():
            if "taken over" in line:
                print(line)
    return is_right


def main() -> int:
    parser = argparse.ArgumentParser(prog="kill_engine", description="Kill the engine under streams.")
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--scale", default="0.1", help="of an 8B model's parameters, where no model is named")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--after", type=float, default=3.0, help="seconds from the streams' beginning to a kill")
    parser.add_argument("--most-seconds", type=float, default=1.0, help="from the kill to a stream's next token")
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    given = parser.parse_args(words[:split])
    flags = words[split + 1 :] or _FLAGS
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; {' '.join(flags)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="quire-kill-") as folder:
        model = given.model
        if model is None:
            model = Path(folder) / "model"
            make = Path(__file__).with_name("make_big.py")
            subprocess.run([sys.executable, "-P", str(make), str(model), "--scale", given.scale], check=True)
        cache = Path(folder) / "packed"
        cache.mkdir()
        return 0 if run(model, given, flags, cache) else 1


if __name__ == "__main__":
    sys.exit(main())
