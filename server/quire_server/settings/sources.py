"""Sources of settings: flags, `QUIRE_*` variables and a YAML file, and how each source spells a setting's name.

Owns the reading of the environment. Promises: an unknown name is refused with a suggestion, and a message uses the
spelling of the source that the value came from. Must not know: torch, HTTP.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import yaml
from pydantic_core import ErrorDetails

from quire_engine.plain_files import read_plain_text
from quire_server.settings.limits import REMOVED, WITHOUT_EFFECT, removed_line

ENV_PREFIX = "QUIRE_"
VLLM_KEY = "VLLM_API_KEY"

# A Kubernetes service called "quire" or "quire-db" injects such variables into every pod beside it; one of its port has
# the name that a setting may have, and a value that none can.
_SERVICE_LINK = re.compile(r"QUIRE_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)", re.IGNORECASE)
_SERVICE_PORT = re.compile(r"QUIRE_(\w+_)?PORT", re.IGNORECASE)
_PORT_URL = re.compile(r"(tcp|udp|sctp)://")


class SettingsError(Exception):
    """Settings that cannot be used. One readable line per problem."""

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


def flag_name(field: str) -> str:
    """`max_num_seqs` -> `--max-num-seqs`."""
    return "--" + field.replace("_", "-")


def with_flags(advice: str, spelled: Callable[[str], str] = flag_name) -> str:
    """The engine's message `set max_num_seqs to 3 or less` with names spelled as flags."""
    return re.sub(r"(?:(?<=\bset )|(?<=\bor ))([a-z_]+) to (?=\d)", lambda found: f"{spelled(found[1])} ", advice)


def read_yaml(path: Path, source: str) -> object:
    """The parsed content of a YAML file, of any type. Raises SettingsError, which begins with `source`."""
    try:
        return yaml.safe_load(read_plain_text(path))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{source}: cannot be read: {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a day that no calendar has
        raise SettingsError(f"{source}: not YAML: {' '.join(str(error).split())}") from None


def read_config(path: Path, known: Callable[[str], bool], names: Collection[str]) -> dict[str, object]:
    """The settings of a YAML file; keys in kebab-case or snake_case. Raises SettingsError, for unknown keys too.

    `names` are suggested for a key that is not `known`.
    """
    values = read_yaml(path, f"--config {path}")
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise SettingsError(f"--config {path}: expected `name: value` lines such as `port: 8000`")
    named = {str(key).replace("-", "_"): value for key, value in values.items()}
    if "config" in named:
        raise SettingsError(f"--config {path}: a configuration file cannot name another one; remove `config`")
    unknown = [key for key in named if not known(key)]
    if unknown:
        raise SettingsError(*(f"--config {path}: unknown setting {key!r}{suggest(key, names)}" for key in unknown))
    return {key: value for key, value in named.items() if value is not None}


def moved_line(spelling: str, pair: str) -> str:
    """The refusal of an experiment that is given as a setting of its own; `pair`: how it is written now."""
    return f"{spelling} is an experiment now: write {pair}"


def check_environment(known: Collection[str], experiments: Collection[str] = ()) -> None:
    """Raises SettingsError for `QUIRE_*` variables that set nothing, except those that Kubernetes has set."""
    unknown = {
        name: name.removeprefix(ENV_PREFIX).lower()
        for name, value in os.environ.items()
        if name.startswith(ENV_PREFIX)
        and name.removeprefix(ENV_PREFIX).lower() not in known
        and not is_service_link(name, value)
    }
    if unknown:
        raise SettingsError(*(_unknown_variable(name, field, known, experiments) for name, field in unknown.items()))


def _unknown_variable(name: str, field: str, known: Collection[str], experiments: Collection[str]) -> str:
    if field in REMOVED or field in WITHOUT_EFFECT:
        return removed_line(name, field)
    if field in experiments:
        return moved_line(name, f"{ENV_PREFIX}SET={field}={os.environ[name]}")
    return f"unknown environment variable {name}{suggest(name, known, ENV_PREFIX)}"


def is_service_link(name: str, value: str | None) -> bool:
    """Whether Kubernetes has set this variable of the environment for a service, and not an operator for us."""
    if _SERVICE_LINK.fullmatch(name):
        return True
    return _SERVICE_PORT.fullmatch(name) is not None and _PORT_URL.match(value or "") is not None


def service_link_warnings() -> list[str]:
    """A line about the variables of the environment that are passed over as a Kubernetes service's; none without."""
    links = sorted(n for n, value in os.environ.items() if n.startswith(ENV_PREFIX) and is_service_link(n, value))
    if not links:
        return []
    others = f" and {len(links) - 1} more" if len(links) > 1 else ""
    return [
        f"{links[0]}{others} in the environment: passed over as links to a Kubernetes service, which set nothing;"
        " enableServiceLinks: false in the pod leaves them out"
    ]


def check_keys() -> None:
    """Raises SettingsError if a variable for keys is set but empty: an empty secret must not open a server."""
    _check_keys(f"{ENV_PREFIX}API_KEY", VLLM_KEY)


def check_admin_keys() -> None:
    """Check the operator's keys, as `check_keys` does for clients' keys."""
    _check_keys(f"{ENV_PREFIX}ADMIN_API_KEY")


def _check_keys(*names: str) -> None:
    for name in names:
        if not os.environ.get(name, "key").strip(" \t\r\n,[]\"'"):
            raise SettingsError(f"{name} is set but has no key in it; unset it to serve without")


def vllm_key() -> dict[str, object]:
    """The key in vLLM's variable, taken literally: neither a list nor a name and a key."""
    key = os.environ.get(VLLM_KEY, "").strip()
    return {"api_key": (f"={key}",)} if key else {}


def api_key_of_environment() -> str:
    """The first key in the clients' variable, as it is written there, perhaps with a name; empty if none is set."""
    return _first(f"{ENV_PREFIX}API_KEY")


def admin_key_of_environment() -> str:
    """The first key in the operator's variable, as `api_key_of_environment` returns the clients'."""
    return _first(f"{ENV_PREFIX}ADMIN_API_KEY")


def _first(name: str) -> str:
    return os.environ.get(name, "").strip(" \t[]").partition(",")[0].strip(" \t\"'")


@dataclass(frozen=True, slots=True, kw_only=True)
class NotifyAddress:
    """The address of a service manager, as sd_notify(3) has it."""

    path: str  # of a datagram socket; with an @ first a name in the abstract namespace
    watchdog_seconds: float | None  # it ends a process that is silent for so long; None: it does not


def notify_address() -> NotifyAddress | None:
    """The address that a service manager has set for this process; None where there is none."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path.startswith(("/", "@")):
        return None
    microseconds, process = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    is_watched = microseconds.isdecimal() and int(microseconds) > 0 and process in {"", str(os.getpid())}
    return NotifyAddress(path=path, watchdog_seconds=int(microseconds) / 1e6 if is_watched else None)


def environment_names() -> tuple[str, ...]:
    """The names of all variables."""
    return tuple(os.environ)


def suggest(name: str, known: Collection[str], prefix: str = "") -> str:
    """A did-you-mean for an unknown name, in the spelling of the source it came from."""
    bare = name.removeprefix(prefix).removeprefix("--").replace("-", "_").lower()
    candidates = [*known, *_NAMED_ELSEWHERE]
    close = get_close_matches(bare, candidates, n=1, cutoff=0.7)
    if not close:
        return "; `quire serve --help` lists all"
    field = _NAMED_ELSEWHERE.get(close[0], close[0])
    if prefix:
        return f"; did you mean {prefix}{field.upper()}?"
    return f"; did you mean {flag_name(field) if name.startswith('--') else field}?"


# Other servers' names for some of our settings; vLLM's flags have a table of their own.
_NAMED_ELSEWHERE = {
    "chunked_prefill_size": "prefill_chunk",
    "max_running_requests": "max_num_seqs",
    "max_queued_requests": "max_num_queued_reqs",
    "context_length": "max_model_len",
    "model_path": "model",
    "mem_fraction_static": "gpu_memory_utilization",
    "schedule_policy": "scheduling_policy",
}


def explain(problem: ErrorDetails, flags: Mapping[str, object], experiments: Collection[str]) -> str:
    """One validation problem in the spelling of the source the value came from."""
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return message
    field = str(problem["loc"][0])
    variable = ENV_PREFIX + field.upper()
    if field in experiments:
        source = _experiment(field, flags)
    elif field in flags:
        source = flag_name(field)
    elif variable in os.environ:
        source = variable
    else:
        source = f"{field} in the configuration file"
    given = "" if field in {"api_key", "admin_api_key"} else f" (got {str(problem['input'])[:80]!r})"
    return f"{source}: {message[:1].lower()}{message[1:]}{given}"


def _experiment(field: str, flags: Mapping[str, object]) -> str:
    """How an experiment is spelled where it is set."""
    if field in flags:
        return f"--set {field}"
    if re.search(rf"\b{field} *=", os.environ.get(f"{ENV_PREFIX}SET", "").replace("-", "_")):
        return f"{ENV_PREFIX}SET: {field}"
    return f"set: {field} in the configuration file"
