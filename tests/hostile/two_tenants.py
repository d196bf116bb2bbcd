"""Two tenants of one server, a victim and an attacker, and prompts that share nothing."""

from __future__ import annotations

import random

VICTIM, ATTACKER = "key-of-victim", "key-of-attacker"
KEYS = ("--api-key", f"victim={VICTIM}", f"attacker={ATTACKER}")
dice = random.Random(26)


def unique(count: int) -> list[int]:
    """So many tokens, drawn anew at each call."""
    return [dice.randrange(20, 400) for _ in range(count)]
