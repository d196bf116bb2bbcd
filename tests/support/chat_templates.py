"""Chat templates of the usual kinds, and a maker that closes what it made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quire_server.text.prompt import ChatTemplate
from quire_server.text.tokenizer import TextTokenizer
from support import sample_tokenizers

TOKENIZER = TextTokenizer(
    sample_tokenizers.byte_level(), config={}, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}
)

CHATML = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if loop.first and message.role == 'system' %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

INST = """\
{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'].strip() + ' [/INST]' }}
{% else %}
{% generation %}{{ ' ' + message['content'] | trim + eos_token }}{% endgeneration %}
{% endif %}
{% endfor %}
"""

PARTS = """\
{% for message in messages %}{{ message.role }}:
{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }};{% endif %}{% endfor %}{% endfor %}"""

TOOLS = "{{ messages | tojson }}{{ messages[0].tool_calls[0].function.arguments | tojson }}{{ tools is none }}"

CHAT = [
    {"role": "user", "content": "Hi, <b>you</b> 'and' \"me\" & naïve 日本"},
    {"role": "assistant", "content": "Hello.  "},
    {"role": "user", "content": " And then? "},
]


@contextmanager
def templates() -> Iterator[Callable[..., ChatTemplate]]:
    """Make templates over TOKENIZER, each source with each options once; their processes end with the context."""
    made: dict[str, ChatTemplate] = {}

    def build(source: str, **options: object) -> ChatTemplate:
        key = repr((source, options))
        if key not in made:
            made[key] = ChatTemplate(source, TOKENIZER, **options)
        return made[key]

    try:
        yield build
    finally:
        for template in made.values():
            template.close()
