"""Reads `--kv-events-config`, and makes the publishers that it asks for.

Promises: a wrong key or value is one line; nothing of ZeroMQ is imported where no events are published.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from importlib.util import find_spec
from typing import Any

from quire_engine.contract.errors import ConfigError
from quire_server.engine.kv_events.events import FLAG, CacheListener, KVEventsConfig


def kv_events_config(given: Mapping[str, Any]) -> KVEventsConfig | None:
    """The checked settings; None where no events are published. Raises ConfigError."""
    known = {field.name: field.type for field in fields(KVEventsConfig)}
    for key, value in given.items():
        if key in {"enable_kv_cache_events", "publisher"}:
            continue
        if key not in known:
            raise ConfigError(
                f"{FLAG}: {key!r} is no key of it; there are enable_kv_cache_events, publisher, {', '.join(known)}"
            )
        wants_number = known[key] == "int"
        if wants_number and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise ConfigError(f"{FLAG}: {key} is {value!r}, expected a number from 0 on")
        if not wants_number and not isinstance(value, str) and not (value is None and key == "replay_endpoint"):
            raise ConfigError(f"{FLAG}: {key} is {value!r}, expected a text")
    is_on = given.get("enable_kv_cache_events", False)
    if not isinstance(is_on, bool):
        raise ConfigError(f"{FLAG}: enable_kv_cache_events is {is_on!r}, expected true or false")
    publisher = given.get("publisher") or ("zmq" if is_on else "null")
    if publisher not in {"zmq", "null"}:
        raise ConfigError(f"{FLAG}: publisher is {publisher!r}, there are zmq and null")
    if not is_on or publisher == "null":
        return None
    config = KVEventsConfig(**{key: value for key, value in given.items() if key in known})
    for name, end in (("endpoint", config.endpoint), ("replay_endpoint", config.replay_endpoint)):
        if end is not None and not end.startswith(("tcp://", "ipc://", "inproc://")):
            raise ConfigError(f"{FLAG}: {name} is {end!r}, expected tcp://HOST:PORT, or ipc://PATH")
    return config


def cache_listeners(given: Mapping[str, Any], count: int) -> list[CacheListener]:
    """A publisher for each of `count` engines; none where no events are published. Raises ConfigError."""
    config = kv_events_config(given)
    if config is None:
        return []
    if find_spec("zmq") is None:
        raise ConfigError(f"{FLAG} needs pyzmq: pip install 'quire[events]', or leave it out")
    from quire_server.engine.kv_events.publisher import Publisher  # noqa: PLC0415 - needs pyzmq

    made: list[CacheListener] = []
    try:
        for rank in range(count):
            made.append(Publisher(config.of_rank(rank), rank))
    except ConfigError:
        for each in made:
            each.close()
        raise
    return made
