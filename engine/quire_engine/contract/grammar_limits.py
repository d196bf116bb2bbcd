"""Limits on the cost of a grammar, in the library's own counters, so that every machine refuses the same grammars.

Promises: the grammar check and the engine both use these limits. Must not know: tokenizers, requests.
"""

from __future__ import annotations

# By the names of llguidance's `LLParserLimits`, which count work and not time. They bound one mask to some 15 ms, and
# the mask at which the lexer exceeds its states, and the request fails, to 50 ms: a hostile grammar cannot delay a step
# for longer. Strings of bounded length need one lexer state per character, so fewer states would refuse them.
GRAMMAR_LIMITS: dict[str, int | bool] = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 10_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,  # an error's text is shown to the client: without the parser's state
}
MAX_COMPILED = 64  # compiled grammars that are kept, by least recent use
