"""Headers that tell a client what of its request had no effect, and the refusal where the operator wants none of it.

Promises: values are harmless characters of bounded length, whatever names the client made up.
Must not know: dialects, which fields there are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from quire_server.errors import BadRequest
from quire_server.state import ServerState

_REPORTABLE = re.compile(r"[A-Za-z0-9_. -]{1,64}")
_MAX_REPORTED = 16
_NONE: Mapping[str, object] = {}


def notes(
    state: ServerState,
    without_effect: Sequence[str],
    messages: Sequence[Mapping[str, object]] = (),
    variables: Mapping[str, object] = _NONE,
) -> dict[str, str]:
    """Headers that say which fields had no effect, and what of a conversation the chat template does not name.

    Raises BadRequest for fields without effect where the operator wants none.
    """
    headers, said = {}, []
    if without_effect:
        listed = _header_list(without_effect)
        if state.settings.strict:
            raise BadRequest(
                f"Without effect on this server: {listed}. It is set to refuse such fields.",
                param=without_effect[0],
                code="unknown_parameter",
            )
        headers["x-quire-ignored"] = listed
        said.append(f"without effect: {listed}")
    if state.prompts is not None:
        found = state.prompts.unnamed(messages, variables)
        said += [
            f"the chat template does not name the {kind} {_header_list(names)}"
            for kind, names in found.items()
            if names
        ]
    if said:
        headers["x-quire-notes"] = "; ".join(said)
    return headers


def _header_list(names: Sequence[str]) -> str:
    """Names as one header value: harmless characters, bounded length."""
    shown = [name if _REPORTABLE.fullmatch(name) else "?" for name in names[:_MAX_REPORTED]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f", and {more} more" if more else "")
