"""The markdown process: makes HTML of what a model wrote, for the pages; one JSON line in, one line out.

Promises: the HTML has no scripts, no styles, no images and no links but to http, https and mailto addresses, whatever
the text says; it dies when a line takes too long or too much memory, or when its parent is gone. `markdown` starts it
by file name.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence

import nh3
from markdown_it import MarkdownIt
from markdown_it.common.utils import escapeHtml
from markdown_it.renderer import RendererHTML
from markdown_it.rules_core import StateCore
from markdown_it.token import Token
from markdown_it.utils import OptionsDict
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

_NICENESS = 10  # so that running streams come first
_SMALLER = 3  # levels by which headings are lowered: those of the page itself stand above an answer's
_HIGHLIGHTED_CHARS = 1 << 15  # of one block of code; a longer one is shown without colours
_LANGUAGE = re.compile(r"[\w+#.-]{1,32}")
_ADDRESS = re.compile(r"(https?|mailto):", re.IGNORECASE)
_TAGS = {
    *("p", "h4", "h5", "h6", "blockquote", "hr", "br", "ul", "ol", "li", "pre", "code", "span"),
    *("em", "strong", "s", "a", "table", "thead", "tbody", "tr", "th", "td"),
}
_ATTRIBUTES = {
    "a": {"href", "title"},
    "ol": {"start"},
    **{tag: {"class"} for tag in ("code", "span", "th", "td")},
}
_BARE_URL = re.compile(r"(?<![\w/])https?://[^\W_][^\s<>\"`]{0,2047}", re.IGNORECASE)
_ENDS_SENTENCE = ".,:;!?'*_~…"
_FORMATTER = HtmlFormatter(nowrap=True)


class Renderer:
    """Markdown with tables and coloured code as HTML that a page may show."""

    def __init__(self) -> None:
        self._markdown = MarkdownIt("commonmark", {"html": False, "highlight": _highlighted})
        self._markdown.enable(["table", "strikethrough"])
        self._markdown.core.ruler.push("lower_headings", _lower_headings)
        self._markdown.core.ruler.push("link_urls", _link_urls)
        self._markdown.add_render_rule("image", _image_as_link)

    def render(self, text: str) -> str:
        """The text as clean HTML."""
        return nh3.clean(
            self._markdown.render(text),
            tags=_TAGS,
            attributes=_ATTRIBUTES,
            attribute_filter=_attribute,
            url_schemes={"http", "https", "mailto"},
            link_rel="noopener noreferrer nofollow",
            set_tag_attribute_values={"a": {"target": "_blank"}},
        )


def _highlighted(code: str, language: str, _attributes: str) -> str:
    """The code with a span for each token; empty, for plain code, where the language is not known."""
    if not language or len(code) > _HIGHLIGHTED_CHARS:
        return ""
    try:
        lexer = get_lexer_by_name(language, stripnl=False)
    except ClassNotFound:
        return ""
    html: str = highlight(code, lexer, _FORMATTER)
    return html


def _lower_headings(state: StateCore) -> None:
    """Lower headings, and give aligned cells a class in place of a style, which the pages' policy forbids."""
    for token in state.tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(int(token.tag[1]) + _SMALLER, 6)}"
        elif style := token.attrs.pop("style", None):
            token.attrSet("class", str(style).rpartition(":")[2])


def _link_urls(state: StateCore) -> None:
    """Turn http and https addresses that stand in plain text into links; links and code stay as they are."""
    for block in state.tokens:
        if block.children:
            block.children = list(_with_links(block.children, state.md))


def _with_links(tokens: Sequence[Token], markdown: MarkdownIt) -> Iterator[Token]:
    depth = 0  # of links
    for token in tokens:
        if token.type in ("link_open", "link_close"):
            depth += token.nesting
        if token.type != "text" or depth:
            yield token
            continue
        at = 0
        for found in _BARE_URL.finditer(token.content):
            url = _without_punctuation(found[0])
            yield _text(token.content[at : found.start()])
            yield Token("link_open", "a", 1, attrs={"href": markdown.normalizeLink(url)})
            yield _text(url)
            yield Token("link_close", "a", -1)
            at = found.start() + len(url)
        yield _text(token.content[at:])


def _without_punctuation(url: str) -> str:
    """The address without what ends its sentence, and without a bracket at its end that was opened before it."""
    while True:
        kept = url.rstrip(_ENDS_SENTENCE)
        for opening, closing in ("()", "[]", "{}"):
            if kept.endswith(closing) and kept.count(closing) > kept.count(opening):
                kept = kept[:-1]
        if kept == url:
            return url
        url = kept


def _text(content: str) -> Token:
    return Token("text", "", 0, content=content)


def _image_as_link(
    _renderer: RendererHTML,
    tokens: Sequence[Token],
    index: int,
    _options: OptionsDict,
    _environment: MutableMapping[str, object],
) -> str:
    """A link in place of an image: to load one would tell its site who reads the answer."""
    image = tokens[index]
    named = escapeHtml(image.content or "without a name")
    return f'<a href="{escapeHtml(str(image.attrs["src"]))}">Image: {named}</a>'


def _attribute(tag: str, attribute: str, value: str) -> str | None:
    """The value of an attribute that may stay."""
    if attribute == "href":
        return value if _ADDRESS.match(value) else None
    if tag == "code":
        return value if _LANGUAGE.fullmatch(value.removeprefix("language-")) else None
    return value


def _limit(memory_bytes: int) -> None:
    """The kernel enforces both limits: nothing in a text can outlive them."""
    with contextlib.suppress(ValueError, OSError):  # not every system can bound address space
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # handlers and masks are inherited from the parent
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    os.nice(_NICENESS)


def _answer(renderer: Renderer, question: Mapping[str, Sequence[str]]) -> dict[str, object]:
    try:
        return {"html": [renderer.render(text) for text in question["texts"]]}
    except Exception as exc:  # RecursionError and MemoryError included
        return {"error": type(exc).__name__}


def main(seconds: float, memory_bytes: int) -> None:
    """The first line is empty setup, every further one has texts to be rendered."""
    _limit(memory_bytes)
    renderer: Renderer | None = None
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        reply: dict[str, object] = {}
        if renderer is None:
            renderer = Renderer()
        else:
            reply = _answer(renderer, json.loads(line))
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
