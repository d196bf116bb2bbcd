"""`LLM.get_tokenizer()`: text to ids and back, and conversations as prompts, with transformers' names.

Promises: the same ids and texts as in this model's requests. Must not know: the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire_server.errors import BadRequest
from quire_server.text.prompt import ChatTemplate
from quire_server.text.tokenizer import TextTokenizer


class Tokenizer:
    """The model's tokenizer and its chat template. Works until the LLM is closed."""

    def __init__(self, tokenizer: TextTokenizer, prompts: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._prompts = prompts
        self.bos_token = tokenizer.bos_token
        self.eos_token = tokenizer.eos_token
        self.bos_token_id = tokenizer.bos_token_id
        self.eos_token_id = tokenizer.eos_token_ids[0] if tokenizer.eos_token_ids else None
        self.chat_template = tokenizer.chat_template

    def __len__(self) -> int:
        return self._tokenizer.vocab_size

    @property
    def vocab_size(self) -> int:
        """The size, including added tokens."""
        return self._tokenizer.vocab_size

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text. Raises ValueError for text that is not valid Unicode."""
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except BadRequest as error:
            raise ValueError(error.message) from None

    def decode(self, token_ids: int | Sequence[int], *, skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str]:
        """The spellings in the vocabulary."""
        return [self._tokenizer.vocabulary_string(token_id) for token_id in token_ids]

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **variables: object,
    ) -> str | list[int]:
        """The rendered prompt, as ids or as text. Raises ValueError."""
        if self._prompts is None:
            raise ValueError("this model has no chat template")
        try:
            text = self._prompts.chosen(has_tools=bool(tools)).render(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                kwargs=variables,
                tools=tools,
            )
        except BadRequest as error:
            raise ValueError(error.message) from None
        return self.encode(text, add_special_tokens=False) if tokenize else text
