"""The swap space as it is written: sizes, or GiB as vLLM's flag of that name takes them."""

from __future__ import annotations

import pytest

from quire_server.flags import parse_command_line, parse_flags
from quire_server.settings import Settings, SettingsError


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("4", 4 << 30), ("1.5", 3 << 29), ("1023", 1023 << 30), ("1024", 1024), ("2GiB", 2 << 30), ("2GB", 2e9)],
)
def test_swap_space_takes_gib_as_vllm_does_and_sizes(text: str, size: int):
    assert parse_flags(["--swap-space", text]).swap_space == size
    assert parse_command_line(["--kv-offloading-size", text]).settings.swap_space == size
    if text.replace(".", "").isdigit():
        assert Settings(swap_space=float(text)).swap_space == size


@pytest.mark.parametrize("text", ["-1", "much", "4 pounds"])
def test_a_swap_space_that_is_none_is_refused(text: str):
    with pytest.raises(SettingsError, match="--swap-space"):
        parse_flags([f"--swap-space={text}"])
