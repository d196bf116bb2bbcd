"""Markdown as HTML: what a page shows is right and harmless, and no text holds up its process for long."""

from __future__ import annotations

import asyncio

import pytest

from quire_server.errors import BadRequest
from quire_server.text.markdown import MarkdownRenderer
from quire_server.text.markdown_worker import Renderer

LINK = 'target="_blank" rel="noopener noreferrer nofollow"'


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer()


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("# a\n\n#### b", "<h4>a</h4>\n<h6>b</h6>\n"),
        ("~~a~~ *b*  \nc", "<p><s>a</s> <em>b</em><br>\nc</p>\n"),
        ("3. a", '<ol start="3">\n<li>a</li>\n</ol>\n'),
        ("| a |\n|-:|\n| b |", '<th class="right">a</th>'),
        (
            "```python\nif x\n```",
            '<pre><code class="language-python"><span class="k">if</span> <span class="n">x</span>',
        ),
        ("```nothing\n<x>\n```", '<pre><code class="language-nothing">&lt;x&gt;\n</code></pre>\n'),
        ('```"><script>\na\n```', "<pre><code>a\n</code></pre>\n"),
        ("[a](https://b.c)", f'<p><a href="https://b.c" {LINK}>a</a></p>\n'),
        ("![a](https://b.c/d.png)", f'<p><a href="https://b.c/d.png" {LINK}>Image: a</a></p>\n'),
        (
            "(a https://b.c/d_e?f=(g).)",
            f'<p>(a <a href="https://b.c/d_e?f=(g)" {LINK}>https://b.c/d_e?f=(g)</a>.)</p>\n',
        ),
        ("**http://b.c**", f'<p><strong><a href="http://b.c" {LINK}>http://b.c</a></strong></p>\n'),
        ("[https://a.b](https://c.d)", f'<p><a href="https://c.d" {LINK}>https://a.b</a></p>\n'),
        ("`https://a.b` https://...", "<p><code>https://a.b</code> https://...</p>\n"),
    ],
)
def test_text_becomes_html(renderer: Renderer, text: str, html: str) -> None:
    assert html in renderer.render(text)


@pytest.mark.parametrize(
    "text",
    [
        "<script>x</script>",
        "a <img src=x onerror=y> b",
        "[a](javascript:x)",
        "[a](JaVaScRiPt:x)",
        "[a](java\tscript:x)",
        "[a](&#106;avascript:x)",
        "[a](data:text/html,x)",
        "[a](vbscript:x)",
        "[a](/admin/drain)",
        "[a](//evil.example)",
        "[a]: javascript:x\n\n[a]",
        "![a](javascript:x)",
        "![a](data:image/png;base64,x)",
        "<javascript:x>",
        "```x onmouseover=y\nz\n```",
    ],
)
def test_no_text_does_anything(renderer: Renderer, text: str) -> None:
    html = renderer.render(text)
    assert "href" not in html
    assert "src=" not in html.replace("&lt;img src=x", "")
    assert "<script" not in html
    assert "<img" not in html


def test_a_text_beyond_the_limits_ends_the_process_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "quire_server.text.markdown.MOST_CHARS", 1 << 20
    )  # what is allowed takes some less than a second

    async def both() -> None:
        markdown = MarkdownRenderer(time_limit=2.0)
        assert await markdown.render(["a"]) == ["<p>a</p>\n"]
        with pytest.raises(BadRequest) as refused:
            await markdown.render(["![[" * 100_000])  # a parser's work grows with the square of these
        assert refused.value.code == "text_too_long"
        assert await markdown.render(["b"]) == ["<p>b</p>\n"]
        markdown.close()

    asyncio.run(both())
