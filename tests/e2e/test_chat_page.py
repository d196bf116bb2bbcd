"""The chat at `/` in a real browser, feature by feature: one server and one browser for all of them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.served import Served
from support.browser import CONTRAST, Browser, find

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(find() is None, reason="no Chromium on this machine"),
]

# Replies to chat requests that a test writes itself, one after the other; `sent` has the bodies. The rest is real.
FAKES = """(replies) => {
  window.real ??= fetch;
  window.sent = [];
  window.fetch = async (path, options) => {
    if (!String(path).includes("chat/completions")) return real(path, options);
    sent.push(JSON.parse(options.body));
    const reply = replies.length > 1 ? replies.shift() : replies[0];
    if (reply.status) {
      return new Response(JSON.stringify({error: {message: reply.message, code: reply.code}}), reply);
    }
    const choice = (delta, finish = null) => ({choices: [{index: 0, delta, finish_reason: finish}]});
    const events = reply.deltas.map((delta) => choice(delta));
    if (reply.finish) {
      events.push(choice({}, reply.finish));
      events.push({choices: [], usage: {prompt_tokens: 3, completion_tokens: reply.deltas.length}});
    }
    const body = new ReadableStream({
      async start(stream) {
        options.signal.addEventListener("abort", () => stream.error(options.signal.reason));
        for (const event of events) {
          stream.enqueue(new TextEncoder().encode(`data: ${JSON.stringify(event)}\\n\\n`));
          await new Promise((resolve) => setTimeout(resolve, reply.pause ?? 0));
        }
        if (reply.finish) stream.close();
        else if (reply.broken) stream.error(new TypeError("network error"));
        else window.goOn = () => stream.close();
      },
    });
    return new Response(body, {headers: {"content-type": "text/event-stream", "x-request-id": "req-of-a-test"}});
  };
}"""
MARKDOWN = """# A heading

Some **bold**, `code` and a [link](https://example.com/).

| name | size |
|:--|--:|
| a | 10 |

```python
def f(x):
    return "y"  # z
```

1. one
2. two

The end."""
HOSTILE = """<script>window.hit = 1</script><img src=x onerror="window.hit = 2">

[click](javascript:window.hit=3) <javascript:window.hit=4> [data](data:text/html,<script>hit=5</script>)
[here](/admin/drain) ![spy](http://127.0.0.1:9/spy.png) <iframe src="http://127.0.0.1:9/frame"></iframe>

<a href="https://example.com" onclick="window.hit=6" style="position:fixed">x</a>

```"><img/src=x/onerror=window.hit=7>
<b onmouseover="window.hit=8">text</b>
```
"""
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
LAST = "[...document.querySelectorAll('article.assistant')].at(-1)"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with Served() as started:
        yield started


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture
def page(server: Served, tab: Browser) -> Iterator[Browser]:
    """The page as at a first visit, on a model that is asked for its likeliest words. It must log no error."""
    tab.open(server.url + "/docs")  # the same origin, whose storage is emptied
    tab.run("localStorage.clear()")
    settings = {"sampling": {"temperature": 0, "max_tokens": 200}}
    tab.run(f"localStorage.setItem('quire-chat-settings', JSON.stringify({json.dumps(settings)}))")
    tab.complaints.clear()
    tab.requested.clear()
    visit(tab, server)
    yield tab
    tab.be_offline(False)
    tab.resize(1200, 800)
    tab.prefer(dark=False)
    refused = ("429", "400", "ERR_INTERNET_DISCONNECTED")  # what tests provoke
    assert [text for text in tab.complaints if not any(each in text for each in refused)] == []
    assert [address for address in tab.requested if "://" in address and not address.startswith(server.url)] == []


def visit(page: Browser, server: Served) -> None:
    page.open(server.url + "/")
    page.until("document.title.startsWith('quire-demo')")


def reload(page: Browser) -> None:
    page.run("window.old = true; location.reload()")
    page.until("!window.old && document.title.startsWith('quire-demo')")


def fake(page: Browser, *replies: dict[str, Any]) -> None:
    page.run(f"({FAKES})({json.dumps(replies)})")


def says(text: str, finish: str | None = "stop", **more: Any) -> dict[str, Any]:
    """A reply in pieces of a few characters."""
    return {"deltas": [{"content": text[at : at + 7]} for at in range(0, len(text), 7)], "finish": finish, **more}


def ask(page: Browser, text: str) -> None:
    page.type("#text", text)
    page.press_enter()


def answered(page: Browser, count: int = 1) -> None:
    whole = "document.querySelectorAll('article.assistant .acts').length"
    page.until(f"{whole} === {count} && !document.querySelector('[aria-busy]')")


def talk(page: Browser, text: str, *replies: dict[str, Any]) -> None:
    """A question and its whole answer."""
    if replies:
        fake(page, *replies)
    before = page.run("document.querySelectorAll('article.assistant').length")
    ask(page, text)
    answered(page, before + 1)


def press(page: Browser, text: str, within: str = LAST) -> None:
    """Clicks the button with this text."""
    found = f"find((one) => one.textContent.startsWith({json.dumps(text)}))"
    page.run(f"[...{within}.querySelectorAll('button')].{found}.click()")


def shown(page: Browser) -> list[str]:
    found: list[str] = page.run("[...document.querySelectorAll('article > .text')].map((one) => one.innerText.trim())")
    return found


def sent(page: Browser) -> Any:
    """The body of the last chat request."""
    return page.run("sent.at(-1)")


def titles(page: Browser) -> list[str]:
    found: list[str] = page.run("[...document.querySelectorAll('#list .open')].map((one) => one.textContent)")
    return found


def set_field(page: Browser, selector: str, value: str) -> None:
    field = f"document.querySelector({json.dumps(selector)})"
    page.run(f"{field}.value = {json.dumps(value)}; {field}.dispatchEvent(new Event('input', {{bubbles: true}}))")


def give_file(page: Browser, selector: str, name: str, content: str) -> None:
    """Chooses a file of these characters, each of them a byte."""
    page.run(
        f"(() => {{ const data = new DataTransfer(); const text = {json.dumps(content)};"
        f" data.items.add(new File([Uint8Array.from(text, (c) => c.charCodeAt(0))], {json.dumps(name)}));"
        f" const field = document.querySelector({json.dumps(selector)}); field.files = data.files;"
        " field.dispatchEvent(new Event('change')); })()"
    )


def test_a_real_answer_streams_and_is_counted(page: Browser) -> None:
    assert page.run("document.activeElement.id") == "text"
    assert "2,048 tokens" in page.run("document.getElementById('serving').innerText")
    page.run(
        "window.grew = new Set(); new MutationObserver(() => grew.add("
        "document.querySelector('article.assistant .text')?.innerText.length ?? 0))"
        ".observe(document.getElementById('log'), {subtree: true, childList: true, characterData: true})"
    )
    talk(page, "Tell me a story.")
    assert page.run("grew.size") > 4  # piece by piece
    stats = page.run(f"{LAST}.querySelector('.stats').innerText")
    assert "tokens/s" in stats
    assert "first after" in stats
    talk(page, "What is the capital of France?")
    assert "Paris" in shown(page)[-1]
    assert page.run("document.activeElement.id") == "text"
    assert "Paris" in page.run("document.getElementById('spoken').textContent")  # for a screen reader, once and whole


@pytest.mark.parametrize("size", [(1200, 800, False), (1200, 800, True), (390, 844, False), (390, 844, True)])
def test_it_fits_and_can_be_read(page: Browser, size: tuple[int, int, bool]) -> None:
    width, height, dark = size
    page.resize(width, height)
    page.prefer(dark=dark)
    wide = MARKDOWN + "\n\n```c\n" + "x" * 300 + "\n```\n\n" + "y" * 300
    talk(page, "Show me markdown.", says(wide), {"status": 429, "message": "Full.", "code": "queue_full"})
    talk(page, "And a refusal.")
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.run("document.getElementById('log').scrollWidth - document.getElementById('log').clientWidth") == 0
    assert page.run(CONTRAST) >= 4.5
    page.run("document.getElementById('settings').showModal()")
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.run(CONTRAST) >= 4.5
    if folder := os.environ.get("SCREENSHOTS"):
        page.screenshot(Path(folder) / f"chat-{width}-{'dark' if dark else 'light'}.png")


def test_markdown_is_rendered_while_it_grows(page: Browser) -> None:
    fake(page, says(MARKDOWN, finish=None))
    ask(page, "Show me markdown.")
    page.until(f"{LAST}?.querySelector('table') && {LAST}.querySelector('.code')")  # before the end
    page.until("window.goOn")
    page.run("goOn()")
    answered(page)
    count = {"strong": 1, "h4": 1, "table": 1, "td.right": 1, "ol > li": 2, ".text :not(pre) > code": 1}
    for selector, number in count.items():
        assert page.run(f"{LAST}.querySelectorAll({json.dumps(selector)}).length") == number, selector
    assert page.run(f"{LAST}.querySelector('pre .k').textContent") == "def"
    colours = page.run(f"[...{LAST}.querySelectorAll('pre span')].map((one) => getComputedStyle(one).color)")
    assert len(set(colours)) > 3
    link = page.run(f"(({{href, target, rel}}) => [href, target, rel])({LAST}.querySelector('a'))")
    assert link == ["https://example.com/", "_blank", "noopener noreferrer nofollow"]


def test_hostile_markdown_does_nothing(page: Browser) -> None:
    talk(page, "Attack me.", says(HOSTILE))
    body = f"{LAST}.querySelector('.text')"
    assert page.run(f"{body}.querySelectorAll('script, img, iframe, style, object, form, [style], [id]').length") == 0
    links = page.run(f"[...{body}.querySelectorAll('a[href]')].map((one) => [one.protocol, one.rel])")
    safe = "noopener noreferrer nofollow"  # the image's, and the addresses in what is shown as text
    assert links == [["http:", safe], ["http:", safe], ["https:", safe]]
    assert "<script>window.hit = 1</script>" in page.run(f"{body}.innerText")
    page.run(f"for (const one of {body}.querySelectorAll('*')) one.dispatchEvent(new MouseEvent('mouseover'))")
    assert page.run("typeof window.hit") == "undefined"
    reload(page)
    page.until("document.querySelector('.code')")
    assert page.run("typeof window.hit") == "undefined"


def test_what_cannot_be_rendered_is_shown_as_it_is(page: Browser) -> None:
    text = "**a** " + "x" * (1 << 16)
    talk(page, "Go on and on.", {"deltas": [{"content": text}], "finish": "stop"})
    assert shown(page)[-1] == text


def test_the_cost_of_rendering_is_that_of_the_length(page: Browser) -> None:
    """Paragraphs that are finished are rendered once while an answer grows, and once more at its end."""
    cuts = "(async () => { const {boundary} = await import('/pages/markdown.js'); return [%s].map(boundary); })()"
    texts = [
        "one",
        "one\n\ntwo",
        "- a\n\n- b",
        "```\n\nx\n\ny",
        "- a\n\nb\n\nc",
        "~~~\n```\n\nx\n~~~\n\nend",
        "1. a\n\n   b",
    ]
    assert page.run(cuts % ", ".join(map(json.dumps, texts))) == [0, 5, 0, 0, 8, 16, 0]
    page.run(
        "window.asked = 0; window.first = fetch; window.fetch = (path, options) => { if (path === 'pages/render')"
        " asked += JSON.parse(options.body).texts.join('').length; return first(path, options); }"
    )
    text = "\n\n".join(f"Paragraph {number} has some words." for number in range(60))
    fake(page, says(text, pause=4))
    ask(page, "Write.")
    answered(page)
    assert page.run("document.querySelectorAll('article.assistant .text p').length") == 60
    assert page.run("asked") < 4 * len(text)


def test_thoughts_are_folded_and_calls_of_tools_are_shown_and_answered(page: Browser) -> None:
    call = {"index": 0, "id": "call_1", "function": {"name": "weather", "arguments": '{"city": '}}
    more = {"index": 0, "function": {"arguments": '"Rome"}'}}
    deltas = [{"reasoning": "Let me "}, {"reasoning_content": "see."}, {"tool_calls": [call]}, {"tool_calls": [more]}]
    set_field(page, "#tools", json.dumps(TOOLS))
    talk(page, "How is it in Rome?", {"deltas": deltas, "finish": "tool_calls"}, says("It is **sunny**."))
    assert sent(page)["tools"] == TOOLS
    assert page.run("document.querySelector('details.thought .text').textContent") == "Let me see."
    assert not page.run("document.querySelector('details.thought').open")
    assert page.run("document.querySelector('.call h4').textContent") == "Calls weather"
    assert json.loads(page.run("document.querySelector('.call pre').textContent")) == {"city": "Rome"}
    page.type(".call textarea", "25 degrees")
    press(page, "Send results")
    answered(page, 2)
    _, called, result = sent(page)["messages"]
    assert called["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert result == {"role": "tool", "content": "25 degrees", "tool_call_id": "call_1"}
    set_field(page, "#tools", "{}")
    assert "list" in page.run("document.getElementById('tools-problem').textContent")


def test_frames_may_come_in_any_pieces(page: Browser) -> None:
    """Events as another piece of the way may cut them: within a character, with comments, with other line ends."""
    page.run(
        """
        window.real = fetch;
        window.fetch = async (path, options) => {
          if (!path.includes("chat/completions")) return real(path, options);
          const delta = (value, finish = null) =>
            `data: ${JSON.stringify({choices: [{index: 0, delta: value, finish_reason: finish}]})}\\n\\n`;
          const text = delta({role: "assistant", content: ""}) + ": keep-alive\\n\\n"
            + delta({content: "Ça é😀 "}).replace(/\\n/g, "\\r\\n") + delta({content: "va."}, "stop")
            + 'data: {"choices": [], "usage": {"completion_tokens": 7}}\\n\\ndata: [DONE]\\n\\n';
          const bytes = new TextEncoder().encode(text);
          return new Response(new ReadableStream({
            start(controller) {
              for (let at = 0; at < bytes.length; at += 1) controller.enqueue(bytes.slice(at, at + 1));
              controller.close();
            },
          }), {headers: {"content-type": "text/event-stream"}});
        };
        """
    )
    talk(page, "Hello!")
    assert shown(page)[-1] == "Ça é😀 va."
    assert "7 tokens" in page.run(f"{LAST}.querySelector('.stats').textContent")


def test_conversations_are_kept_renamed_deleted_and_brought_back(page: Browser) -> None:
    talk(page, "First question", says("First **answer**."))
    page.click("#new")
    assert page.run("document.querySelectorAll('article').length") == 0
    talk(page, "Second question", says("Second answer."))
    assert titles(page) == ["Second question", "First question"]
    reload(page)
    assert shown(page) == ["Second question", "Second answer."]
    press(page, "First question", "document.getElementById('list')")
    page.until("document.querySelector('article.assistant strong')")
    assert page.run("document.querySelector('[aria-current]').textContent") == "First question"
    press(page, "Rename", "document.querySelector('#list li:has([aria-current])')")
    page.run("document.querySelector('#list input').select()")
    page.type("#list input", "A new name")
    page.press_enter()
    assert sorted(titles(page)) == ["A new name", "Second question"]
    press(page, "Delete", "document.querySelector('#list li:has([aria-current])')")
    assert titles(page) == ["Second question"]
    assert page.run("document.querySelectorAll('article').length") == 0
    press(page, "Undo", "document.getElementById('undo')")
    assert sorted(titles(page)) == ["A new name", "Second question"]


def test_conversations_travel_as_json(page: Browser) -> None:
    talk(page, "A question", says("Its answer."))
    page.run("URL.createObjectURL = (blob) => { window.blob = blob; return '#'; }")
    page.click("#export")
    exported = page.run("blob.text()")
    page.run("localStorage.clear()")
    page.click("#new")
    give_file(page, "#import-file", "chats.json", exported)
    page.until("document.querySelectorAll('#list li').length === 1")
    press(page, "A question", "document.getElementById('list')")
    assert shown(page) == ["A question", "Its answer."]


@pytest.mark.parametrize(
    ("content", "words", "count"),
    [
        ("no json", "no file of exported", 0),
        ('{"format": "another"}', "no file of exported", 0),
        (
            '{"format": "quire-conversations", "conversations": [{"title": 1, "leaf": "b", "messages": ['
            '{"id": "a", "parent": "b", "role": "user"}, {"id": "b", "parent": "b", "role": "user"}, null,'
            '{"id": "c", "parent": null, "role": "evil", "content": "x"},'
            '{"id": "d", "parent": null, "role": "user", "content": "<img src=x onerror=window.hit=1>"}]}]}',
            "Imported 1",
            1,
        ),
    ],
)
def test_a_file_of_conversations_is_not_believed(page: Browser, content: str, words: str, count: int) -> None:
    """Circles, unknown roles and wrong types are left out, and texts stay texts."""
    give_file(page, "#import-file", "chats.json", content)
    page.until(f"document.getElementById('undo').textContent.includes({json.dumps(words)})")
    assert len(titles(page)) == count
    if count:
        page.click("#list .open")
        assert shown(page) == ["<img src=x onerror=window.hit=1>"]
        assert page.run("typeof window.hit") == "undefined"


def test_system_prompt_and_sampling_are_sent_and_the_models_own_values_named(page: Browser, server: Served) -> None:
    page.click("#open-settings")
    placeholders = "[...document.querySelectorAll('#sampling input')].map((one) => one.placeholder)"
    assert page.run(placeholders)[1:5] == ["1", "1", "off", "0"]  # what the server does where the model has no values
    page.run(
        "window.real = fetch; window.fetch = async (path, options) => { const reply = await real(path, options);"
        " if (path !== 'v1/models') return reply; const all = await reply.json();"
        " all.data = ['quire-demo', 'other'].map((id, index) => ({...all.data[0], id, root: id,"
        " state: ['loaded', 'sleeping'][index], default_sampling_params: {temperature: 0.6 + index / 10}}));"
        " return Response.json(all); }"
    )
    reloaded = "import('/pages/settings.js').then(({Models}) => { window.models = new Models("
    page.run(
        reloaded + "document.getElementById('model'), (model) => { window.model = model; }); return models.load(); })"
    )
    options = page.run("[...document.getElementById('model').options].map((one) => one.textContent)")
    assert options == ["quire-demo (in memory)", "other (wakes when asked)"]
    page.run("models.choose('other')")
    assert page.run("model.default_sampling_params.temperature") == pytest.approx(0.7)
    page.run("models.choose('quire-demo')")
    set_field(page, "#system", "Be brief.")
    set_field(page, "#set-temperature", "0.3")
    set_field(page, "#set-top_k", "7")
    set_field(page, "#set-seed", "")
    page.run("document.getElementById('settings').close()")
    talk(page, "Hello!", says("Hi."))
    body = sent(page)
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["top_k"], body["max_tokens"]) == (0.3, 7, 200)
    assert "seed" not in body
    page.click("#new")  # a new chat begins with the same
    assert page.run("document.getElementById('system').value") == "Be brief."


def test_an_answer_goes_on_at_the_length_limit(page: Browser) -> None:
    set_field(page, "#set-max_tokens", "12")
    talk(page, "Tell me a story.")
    assert "ended at the length limit" in page.run(f"{LAST}.querySelector('.stats').innerText")
    begun = shown(page)[-1]
    press(page, "Continue")
    answered(page)
    page.until(f"{LAST}.querySelector('.text').innerText.length > {len(begun)}")
    assert shown(page)[-1].startswith(begun)
    assert len(shown(page)) == 2


def test_regenerate_edit_and_branch_keep_every_version(page: Browser) -> None:
    talk(page, "Question", says("One."), says("Two."), says("Three."), says("Four."))
    press(page, "Regenerate")
    page.until(f"{LAST}.innerText.includes('2 of 2')")
    assert shown(page) == ["Question", "Two."]
    page.click("[aria-label='Earlier version']")
    assert shown(page) == ["Question", "One."]
    press(page, "Edit", "document.querySelector('article.user')")
    set_field(page, ".edit textarea", "Another question")
    press(page, "Send", "document.querySelector('article.user')")
    page.until(f"{LAST}.innerText.includes('Three.')")
    answered(page)
    assert shown(page) == ["Another question", "Three."]
    assert "2 of 2" in page.run("document.querySelector('article.user').innerText")
    page.click("article.user [aria-label='Earlier version']")
    assert shown(page) == ["Question", "Two."]  # what was written last below it
    press(page, "Branch")
    assert len(titles(page)) == 2
    talk(page, "Other way", says("Five."))
    assert len(shown(page)) == 4
    press(page, "Question", "[...document.querySelectorAll('#list li')].at(-1)")
    assert shown(page) == ["Question", "Two."]  # the first conversation is as it was


def test_answers_and_blocks_are_copied(page: Browser) -> None:
    talk(page, "Show me markdown.", says(MARKDOWN))
    page.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    page.click("article.assistant .code button")
    page.until("window.copied")
    assert page.run("copied") == 'def f(x):\n    return "y"  # z\n'
    page.click("article.assistant .acts [aria-label='Copy the message']")
    page.until(f"window.copied === {json.dumps(MARKDOWN)}")


def test_a_text_file_is_attached(page: Browser) -> None:
    fake(page, says("I see."))
    give_file(page, "#attach-file", "notes.md", "a ``` b\nc\n")
    page.until("document.querySelector('#files li')")
    give_file(page, "#attach-file", "picture.png", "\x89PNG\x00")
    page.until("document.getElementById('serving').textContent.includes('picture.png is no text file')")
    talk(page, "What is this?")
    assert sent(page)["messages"] == [
        {"role": "user", "content": "File notes.md:\n````\na ``` b\nc\n````\n\nWhat is this?"}
    ]
    assert page.run("document.querySelector('details.file summary').textContent").startswith("notes.md, ")
    assert page.run("document.querySelectorAll('#files li').length") == 0


def test_why_an_answer_was_slow(page: Browser) -> None:
    talk(page, "Hello!")
    press(page, "Why slow?")
    page.until("document.querySelector('.slow td')")
    assert page.run("document.querySelector('.slow p').innerText").startswith("It took ")
    assert "writing the answer" in page.run("document.querySelector('.slow').innerText")


def test_escape_stops_here_and_there_and_the_arrow_brings_back(page: Browser, server: Served) -> None:
    page.run(
        "window.real = fetch; window.fetch = (path, options) => real(path, path.includes('chat/') ? {...options, body:"
        " JSON.stringify({...JSON.parse(options.body), ignore_eos: true, max_tokens: 2000})} : options)"
    )
    before = server.metric("quire_requests_total", outcome="abort")
    ask(page, "Tell me a story.")
    page.until(f"{LAST}?.querySelector('.text').innerText.length > 40")
    assert page.run("document.getElementById('send').hidden && !document.getElementById('stop').hidden")
    page.press("Escape")
    answered(page)
    assert "stopped" in page.run(f"{LAST}.querySelector('.stats').innerText")
    server.wait_idle()
    assert server.metric("quire_requests_total", outcome="abort") == before + 1, "there"
    page.press("ArrowUp")
    assert page.run("document.getElementById('text').value") == "Tell me a story."
    page.press("ArrowDown")
    assert page.run("document.getElementById('text').value") == ""


def test_an_answer_survives_a_crash_of_the_engine(page: Browser, server: Served) -> None:
    page.run(
        "window.real = fetch; window.fetch = (path, options) => real(path, path.includes('chat/') ? {...options, body:"
        " JSON.stringify({...JSON.parse(options.body), ignore_eos: true, max_tokens: 300})} : options)"
    )
    ask(page, "Tell me a story.")
    page.until(f"{LAST}?.querySelector('.text').innerText.length > 40")
    os.kill(server.engine().pid, signal.SIGKILL)
    answered(page)
    assert page.run("document.querySelectorAll('.problem p').length") == 0
    assert "300 tokens" in page.run(f"{LAST}.querySelector('.stats').innerText")


def test_a_silent_stream_is_explained(page: Browser) -> None:
    fake(page, says("It begins", finish=None))
    page.run(
        "window.faked = fetch; window.fetch = (path, options) => path !== 'health/ready' ? faked(path, options)"
        " : Promise.resolve(Response.json({error: {message: 'The engine is restarting.'}}, {status: 503}))"
    )
    ask(page, "Go on.")
    page.until(f"{LAST}?.innerText.includes('The engine is restarting. The answer goes on by itself')")
    page.press("Escape")
    answered(page)


def test_a_full_context_is_told_in_words(page: Browser) -> None:
    ask(page, "word " * 3000)
    page.until("document.querySelector('.notes .problem')")
    said = page.run("document.querySelector('.notes .problem').innerText")
    assert "does not fit into the model's context" in said
    assert "Try again" in said
    assert page.run("document.querySelector('.problem p').getAttribute('role')") == "alert"


def test_a_full_server_says_when_to_come_again(page: Browser) -> None:
    full = {"status": 429, "message": "Retry later.", "code": "queue_full", "headers": {"retry-after": "60"}}
    talk(page, "Hello!", full, says("Here I am."))
    assert "as many requests as it can take" in page.run(f"{LAST}.innerText")
    left = f"Number({LAST}.innerText.match(/Try again .in (\\d+) s./)[1])"
    first = page.run(left)
    assert 0 < first <= 60
    page.until(f"{left} < {first}")
    press(page, "Try again")
    page.until(f"{LAST}.innerText.includes('Here I am.')")
    assert len(shown(page)) == 2


def test_a_server_that_is_gone_and_comes_back(page: Browser) -> None:
    page.be_offline(True)
    ask(page, "Hello!")
    page.until("document.querySelector('.notes .problem')")
    assert "The server cannot be reached" in page.run(f"{LAST}.innerText")
    page.be_offline(False)
    press(page, "Try again")
    page.until(f"{LAST}.querySelector('.stats')")
    assert page.run("document.querySelectorAll('.problem p').length") == 0


def test_a_connection_that_breaks_keeps_what_came(page: Browser) -> None:
    talk(page, "Go on.", says("It **begins**", finish=None, broken=True), says(" and ends."))
    assert "connection was lost" in page.run(f"{LAST}.querySelector('.problem').innerText")
    press(page, "Continue")
    page.until(f"{LAST}.innerText.includes('and ends.')")
    answered(page)
    assert sent(page)["messages"][-1] == {"role": "assistant", "content": "It **begins**"}
    assert sent(page)["continue_final_message"]
    assert shown(page)[-1] == "It begins and ends."


def test_the_keyboard_alone_is_enough_and_everything_has_a_name(page: Browser) -> None:
    talk(page, "Hello!", says(MARKDOWN))
    page.run("document.querySelector('h1').setAttribute('tabindex', '-1'); document.querySelector('h1').focus()")
    reached = set()
    for _ in range(40):
        page.press("Tab")
        reached.add(page.run("document.activeElement.id || document.activeElement.textContent"))
    for needed in (
        "model",
        "open-settings",
        "open-connect",
        "new",
        "log",
        "text",
        "attach",
        "send",
        "Regenerate",
        "Copy",
    ):
        assert needed in reached, needed
    page.run("document.getElementById('open-settings').focus()")
    page.press_enter()
    page.until("document.getElementById('settings').open")
    page.press("Escape")
    page.until("!document.getElementById('settings').open")
    nameless = page.run(
        "[...document.querySelectorAll('button, input, textarea, select, a')].filter((one) => !one.textContent.trim()"
        " && !one.getAttribute('aria-label') && !one.labels?.length).map((one) => one.outerHTML)"
    )
    assert nameless == []


def test_the_list_opens_on_a_phone(page: Browser) -> None:
    page.resize(390, 844)
    talk(page, "Hello!", says("Hi."))
    assert not page.run("document.getElementById('chats').checkVisibility()")
    page.click("#open-chats")
    assert page.run("document.getElementById('chats').checkVisibility()")
    assert page.run("document.getElementById('open-chats').getAttribute('aria-expanded')") == "true"
    page.press("Escape")
    assert not page.run("document.getElementById('chats').checkVisibility()")
