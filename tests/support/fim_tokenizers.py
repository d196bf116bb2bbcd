"""The byte-level tokenizer with tokens for the middle of a text, and a server's state that has it.

Promises: ids from 260 on, in the order of the names. Must not know: how prompts are made of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer

from support.fake_engine import FakeEngine
from support.fake_tokenizer import VOCAB_SIZE, write_tokenizer
from support.fakes import make_state
from support.plans import changed

if TYPE_CHECKING:
    from quire_server.state import ServerState
    from quire_server.text.tokenizer import TextTokenizer

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")


def fim_tokenizer(path: Path, names: Sequence[str] = QWEN) -> TextTokenizer:
    """Written into an empty directory, and loaded."""
    from quire_server.text.tokenizer import TextTokenizer

    write_tokenizer(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    tokenizer.save(str(path / "tokenizer.json"))
    return TextTokenizer.load(path)


def fim_state(path: Path, engine: FakeEngine) -> ServerState:
    """Call inside an event loop."""
    state = make_state(engine=engine)
    state.client.plan = changed(state.client.plan, model={"vocab_size": VOCAB_SIZE + len(QWEN)})
    return replace(state, model_text=replace(state.model_text, tokenizer=fim_tokenizer(path)))
