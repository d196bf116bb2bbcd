"""The generator against published vectors, and the independence of its streams."""

import math

import pytest

from quire_engine.execution.distribution import philox4x32, uniform

PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI, (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_known_answers_of_the_random123_distribution(counter, key, expected):
    assert philox4x32(counter, key) == expected


def test_uniform_takes_its_53_bits_from_the_first_two_words():
    assert uniform(0, 0, 0) == (((0xE169C58D << 32) | 0x6627E8D5) >> 11) / 2**53


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 2**64 + 5])
def test_any_seed_gives_draws_in_the_half_open_unit_interval(seed):
    draws = [uniform(seed, choice, position) for choice in range(3) for position in range(100)]
    assert all(0.0 <= draw < 1.0 for draw in draws)
    assert len(set(draws)) == len(draws)


def test_seed_choice_and_position_each_change_the_draw():
    draws = {uniform(1, 0, 0), uniform(-1, 0, 0), uniform(1 << 32, 0, 0), uniform(1, 1, 0), uniform(1, 0, 1)}
    draws |= {uniform(1, 0, 1 << 32), uniform(1, 1 << 32, 0)}
    assert len(draws) == 7


def test_draws_are_uniform_along_positions_and_along_seeds():
    for draws in (
        [uniform(7, 0, position) for position in range(20_000)],
        [uniform(seed, 0, 11) for seed in range(20_000)],
    ):
        counts = [0] * 100
        for draw in draws:
            counts[math.floor(draw * 100)] += 1
        chi_square = sum((count - 200) ** 2 / 200 for count in counts)
        assert chi_square < 148.2  # 99 degrees of freedom, p = 0.001
