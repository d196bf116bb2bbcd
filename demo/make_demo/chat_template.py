"""The chat template that is written into the quire-demo folder: ChatML with tools and thinking, as Qwen3 lays them out.

Promises to write what `turns` writes (a test compares them), and to take histories as clients send them: contents that
are null, text or text parts, arguments as an object or as text, several results in a row, system turns anywhere.
Must not know tokens or training.
"""

from __future__ import annotations

from make_demo.turns import INSTRUCTION

CHAT_TEMPLATE = (
    """
{%- macro text_of(content) -%}
    {%- if content is string -%}{{- content -}}
    {%- elif content is iterable and content is not mapping -%}
        {%- for part in content -%}{{- part if part is string else part.text | default('') -}}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set first = 0 -%}
{%- if tools -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if messages and messages[0].role in ['system', 'developer'] -%}
        {%- set first = 1 -%}
        {{- text_of(messages[0].content) + '\\n\\n' -}}
    {%- endif -%}
    {{- '# Tools\\n\\nYou may call these functions:\\n<tools>\\n' -}}
    {%- for tool in tools -%}
        {%- set f = tool.function if tool.function is defined else tool -%}
        {{- '{"name": ' + (f.name | tojson) -}}
        {%- if f.description -%}{{- ', "description": ' + (f.description | tojson) -}}{%- endif -%}
        {%- if f.parameters -%}{{- ', "parameters": ' + (f.parameters | tojson) -}}{%- endif -%}
        {{- '}\\n' -}}
    {%- endfor -%}
    {{- '</tools>\\n"""
    + INSTRUCTION.replace("\n", "\\n")
    + """<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages[first:] -%}
    {%- set role = 'system' if message.role == 'developer' else message.role -%}
    {%- if role in ['tool', 'function'] -%}
        {%- if loop.first or loop.previtem.role not in ['tool', 'function'] -%}{{- '<|im_start|>user' -}}{%- endif -%}
        {{- '\\n<tool_response>\\n' + text_of(message.content) + '\\n</tool_response>' -}}
        {%- if loop.last or loop.nextitem.role not in ['tool', 'function'] -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
    {%- else -%}
        {{- '<|im_start|>' + role + '\\n' + text_of(message.content) -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set f = call.function if call.function is defined else call -%}
            {%- if not loop.first or text_of(message.content) -%}{{- '\\n' -}}{%- endif -%}
            {{- '<tool_call>\\n{"name": ' + (f.name | tojson) + ', "arguments": ' -}}
            {{- (f.arguments if f.arguments is string else f.arguments | tojson) + '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if enable_thinking is defined and enable_thinking is not none -%}
        {%- if enable_thinking -%}{{- '<think>\\n' -}}{%- endif -%}
    {%- elif reasoning_effort and reasoning_effort != 'none' -%}{{- '<think>\\n' -}}
    {%- endif -%}
{%- endif -%}
"""
).strip()
