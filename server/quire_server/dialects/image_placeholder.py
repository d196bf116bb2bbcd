"""A text in place of each image of a request's messages, where the operator has set one (`--image-placeholder`).

An agent's session so goes on when one of its tools returns a picture. The bodies of all dialects pass here before they
are validated; without such a text an image stays a part that no model here reads, which is a 400.
"""

from __future__ import annotations

from collections.abc import Callable

from quire_server.http.body import JsonObject

# Types of content parts: of chats, of responses, of Anthropic's messages.
_IMAGE_TYPES = ("image_url", "input_image", "image")
_MOST_LEVELS = 4  # a tool's result is a part with parts of its own
REPORTED = "image_content"  # by this name the reply's header tells that images had no effect


def image_placeholder(text: str) -> Callable[[JsonObject], JsonObject]:
    """Return a function that puts a text in place of the images of a body, in place."""

    def revise(body: JsonObject) -> JsonObject:
        found = False
        for name in ("messages", "input"):
            found |= _revise_turns(body.get(name), text)
        found |= _revise_images(body, "prompt", text)
        if found:
            body[REPORTED] = True
        return body

    return revise


def _revise_turns(turns: object, text: str) -> bool:
    """Replace the images of a conversation's messages and items; whether there were any."""
    found = False
    for turn in turns if isinstance(turns, list) else ():
        if isinstance(turn, dict):
            found |= _revise_images(turn, "content", text)
            for name in ("content", "output"):
                found |= _revise_parts(turn.get(name), text, _MOST_LEVELS)
    return found


def _revise_parts(parts: object, text: str, levels: int) -> bool:
    """Replace the parts that are images, also those within a tool's result."""
    found = False
    for place, part in enumerate(parts) if isinstance(parts, list) and levels else ():
        if not isinstance(part, dict):
            continue
        if part.get("type") in _IMAGE_TYPES:
            kept = {"cache_control": part["cache_control"]} if "cache_control" in part else {}
            parts[place] = {"type": "text", "text": text, **kept}  # type: ignore[index]
            found = True
        else:
            found |= _revise_parts(part.get("content"), text, levels - 1)
    return found


def _revise_images(turn: JsonObject, target: str, text: str) -> bool:
    """Move Ollama's list of images into the text that they came with, as placeholders; whether there were any."""
    images, beside = turn.get("images"), turn.get(target, "")
    if not isinstance(images, list) or not images or not isinstance(beside, str):
        return False
    del turn["images"]
    turn[target] = "\n".join([beside, *[text] * len(images)] if beside else [text] * len(images))
    return True
