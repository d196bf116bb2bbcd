"""What a grammar may cost: the library's own counters, so that the same grammar is refused everywhere alike.

Promises: whoever checks a grammar and whoever follows it uses these. Must not know: tokenizers, requests.
"""

from __future__ import annotations

# By the names of llguidance's `LLParserLimits`. Its counters are of work, not of time: what one machine refuses every
# other does too. They bound one mask to some 15 ms, and the one in which the lexer has too many states to 50, after
# which its request has failed: a hostile grammar cannot hold a step for longer. Fewer states would end texts of a
# bounded length early, which need one for each character.
GRAMMAR_LIMITS: dict[str, int | bool] = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 10_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,  # an error's text is shown to the client: without the parser's state
}
MAX_COMPILED = 64  # grammars kept ready; of more, the least recently used ones are compiled again
