"""Typed access to the JSON files of a checkpoint: what is missing, of a wrong type or unread is named."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path

from quire_engine.contract.errors import ModelLoadError, NotNative
from quire_engine.gguf import typed_name
from quire_engine.plain_files import read_plain

MAX_BYTES = 64 << 20  # a config is kilobytes and the largest shard index a few megabytes


class Options:
    """Typed access to one JSON object. A default stands in for a key that is absent or null.

    A value of the wrong type or out of range is a ModelLoadError that names the file, the key and the value.
    """

    def __init__(self, values: dict[str, object], where: str) -> None:
        self._values = values
        self._where = where
        self._read: set[str] = set()

    @classmethod
    def read(cls, file: Path, ignored: Collection[str] = ()) -> Options:
        values = read_json_object(file)
        return cls({key: value for key, value in values.items() if key not in ignored}, typed_name(file))

    def error(self, reason: str) -> ModelLoadError:
        return ModelLoadError(f"{self._where}: {reason}")

    def beyond(self, reason: str) -> NotNative:
        return NotNative(f"{self._where}: {reason}")

    def unread(self) -> set[str]:
        """The keys that were not asked for."""
        return self._values.keys() - self._read

    def put(self, key: str, value: object) -> None:
        """A value in place of the key's own."""
        self._values[key] = value

    def pass_over(self, keys: re.Pattern[str]) -> None:
        """Let these keys count as read."""
        self._read |= {key for key in self._values if keys.fullmatch(key)}

    def keys(self) -> set[str]:
        return set(self._values)

    def has(self, key: str) -> bool:
        """Whether the key is there, be it null."""
        self._read.add(key)
        return key in self._values

    def given(self, key: str) -> bool:
        """Whether the key has a value other than null."""
        return self._values.get(key) is not None

    def raw(self, key: str) -> object:
        self._read.add(key)
        return self._values.get(key)

    def section(self, key: str) -> Options:
        """A nested object; empty if absent or null."""
        value = self.raw(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.error(f"{key} must be an object, not {value!r}")
        return Options(value, f"{self._where}: {key}")

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = (1 << 31) - 1) -> int:
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.error(f"{key} must be an integer from {least} to {most}, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None, *, zero: bool = False) -> float:
        """A positive number; with `zero`, 0 as well."""
        value = self._present(key, default)
        # Compared before any conversion: JSON integers can be too large for a float.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e30:
            raise self.error(f"{key} must be a positive number, not {value!r}")
        if value == 0 and not zero:
            raise self.error(f"{key} must be greater than 0")
        return float(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of positive numbers."""
        values = self.raw(key)
        if not isinstance(values, list) or not values:
            raise self.error(f"{key} must be a list of numbers, not {values!r}")
        items = Options({f"{key}[{place}]": value for place, value in enumerate(values)}, self._where)
        return tuple(items.number(f"{key}[{place}]") for place in range(len(values)))

    def boolean(self, key: str, default: bool) -> bool:
        value = self._present(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, not {value!r}")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._present(key, default)
        if not isinstance(value, str):
            raise self.error(f"{key} must be a string, not {value!r}")
        return value

    def _present(self, key: str, default: object) -> object:
        value = self.raw(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"{key} is missing")
        return value


def read_json_object(file: Path) -> dict[str, object]:
    """The object in a JSON file. Raises ModelLoadError if it is missing, too large, or not an object."""
    try:
        value = json.loads(read_plain(file, MAX_BYTES))
    except FileNotFoundError:
        raise ModelLoadError(f"{file}: no such file") from None
    except OSError as error:
        raise ModelLoadError(f"{file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{file}: must hold a JSON object")
    return value
