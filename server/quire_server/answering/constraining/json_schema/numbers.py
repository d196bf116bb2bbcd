"""Expressions for JSON numbers: bounds and constants of any number of digits, held exactly, in the usual spellings.

An integer is written as its digits, as `100.0` with at most `MOST_ZEROS` zeros, or as `1e2` with an exponent up to
`MOST_EXPONENT`; its digits before the exponent are an integer. Another number between bounds has an exponent from
`LEAST_EXPONENT` to `MOST_EXPONENT` or none.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Context, Decimal, localcontext
from functools import lru_cache

MOST_ZEROS = 6
MOST_EXPONENT = 18
LEAST_EXPONENT = -9
DOUBLE_DIGITS = 15  # beyond these only whole numbers are read as they are written, where they have no exponent
MOST_DIGITS = 60  # of a number that is written out

_EXACT = Context(prec=500)  # no calculation here has as many digits

_WHOLE = "(?:0|[1-9][0-9]*)"
PLAIN_INTEGER = f"\\x2d?{_WHOLE}"
_ZEROS = f"(?:\\x2e0{{1,{MOST_ZEROS}}})?"
_FRACTION = "(?:\\x2e[0-9]+)?"
_ANY_EXPONENT = "(?:[eE][+\\x2d]?0?[0-9]{1,2})?"
_ANY_INTEGER = f"\\x2d?{_WHOLE}{_ZEROS}(?:[eE]\\x2b?0?(?:[0-9]|1[0-{MOST_EXPONENT - 10}]))?"
_ANY_NUMBER = f"\\x2d?{_WHOLE}{_FRACTION}{_ANY_EXPONENT}"


def any_number(*, is_integer: bool) -> str:
    """The expression of all numbers, or of all integers."""
    return _ANY_INTEGER if is_integer else _ANY_NUMBER


@lru_cache(maxsize=512)
def at_least(bound: Decimal, *, excluded: bool, is_integer: bool) -> str:
    """The expression of the numbers from a bound on, which itself may be excluded."""
    with localcontext(_EXACT):
        return _either(_beyond(bound, excluded, is_integer, above=True))


@lru_cache(maxsize=512)
def at_most(bound: Decimal, *, excluded: bool, is_integer: bool) -> str:
    """The expression of the numbers up to a bound, which itself may be excluded."""
    with localcontext(_EXACT):
        return _either(_beyond(bound, excluded, is_integer, above=False))


def multiple_of_power(exponent: int, *, is_integer: bool) -> str:
    """The expression of the multiples of ten to a power, without exponents."""
    if exponent >= 0:
        return f"\\x2d?(?:0|[1-9][0-9]*0{{{exponent}}}){_ZEROS}"
    if is_integer:
        return f"\\x2d?{_WHOLE}{_ZEROS}"
    return f"\\x2d?{_WHOLE}(?:\\x2e[0-9]{{1,{-exponent}}}0{{0,{MOST_ZEROS}}})?"


def constant(value: Decimal, *, text: str) -> str:
    """The expression of one number; `text`: its spelling in the schema, which may be its only short one."""
    sign, digits, power = _parts(value)
    spellings = [_plain(text)]
    if len(digits) > DOUBLE_DIGITS:
        return _either(spellings)
    if digits == "0":
        return _either([*spellings, f"\\x2d?0{_ZEROS}"])
    last = len(digits) - 1
    scientific = digits[0] + (f"\\x2e{digits[1:]}0{{0,{MOST_ZEROS}}}" if last else _ZEROS)
    spellings.append(sign + scientific + _exponent(last + power))
    if 0 <= power <= MOST_DIGITS - len(digits):
        spellings.append(sign + digits + "0" * power + _ZEROS)
        for exponent in range(min(power, MOST_EXPONENT) + 1):
            spellings.append(sign + digits + "0" * (power - exponent) + _ZEROS + _exponent(exponent))
    elif -MOST_DIGITS <= power < 0:
        whole = digits[:power] or "0"
        fraction = digits[power:].rjust(-power, "0")
        spellings.append(f"{sign}{whole}\\x2e{fraction}0{{0,{MOST_ZEROS}}}")
    return _either(spellings)


def _parts(value: Decimal) -> tuple[str, str, int]:
    """The sign, the digits without zeros at either end, and the power of ten that they are multiplied by."""
    sign, digits, exponent = value.as_tuple()
    text = "".join(map(str, digits)).lstrip("0")
    stripped = text.rstrip("0")
    return "\\x2d" if sign else "", stripped or "0", int(exponent) + len(text) - len(stripped)


def _either(options: list[str]) -> str:
    return f"(?:{'|'.join(dict.fromkeys(options))})" if options else ""


def _plain(text: str) -> str:
    return "".join(each if each.isalnum() else f"\\x{ord(each):02x}" for each in text)


def _exponent(value: int) -> str:
    sign = "\\x2d" if value < 0 else "[+\\x2d]?" if value == 0 else "\\x2b?"
    return f"[eE]{sign}0?{abs(value)}"


def _beyond(bound: Decimal, excluded: bool, is_integer: bool, *, above: bool) -> list[str]:
    """Numbers on one side of a bound: those of the bound's sign beside it, and all of the other sign beyond zero."""
    towards = bound >= 0 if above else bound <= 0  # whether magnitudes grow away from the bound
    same, other = ("", "\\x2d") if above else ("\\x2d", "")
    if towards:
        found = [same + each for each in _sized(abs(bound), excluded, is_integer, above=True)]
        if bound == 0 and not excluded:
            found.append(f"\\x2d?0{_ZEROS}")
        return found
    found = [other + each for each in _sized(abs(bound), excluded, is_integer, above=False)]
    return [*found, same + (_ANY_INTEGER if is_integer else _ANY_NUMBER).removeprefix("\\x2d?")]


def _sized(bound: Decimal, excluded: bool, is_integer: bool, *, above: bool) -> Iterator[str]:
    """Magnitudes from the bound on, or up to it, without a sign: plain ones, then those with each exponent.

    Exponents of which the digits before them are the same share an expression.
    """
    sized = _integers if is_integer else _decimals
    yield from sized(bound, excluded, above)
    by_digits: dict[str, list[int]] = {}
    for exponent in range(0 if is_integer else LEAST_EXPONENT, MOST_EXPONENT + 1):
        for each in sized(bound.scaleb(-exponent), excluded, above):
            by_digits.setdefault(each, []).append(exponent)
    for digits, exponents in by_digits.items():
        yield f"{digits}(?:{'|'.join(map(_exponent, exponents))})"


def _integers(bound: Decimal, excluded: bool, above: bool) -> list[str]:
    whole = int(bound)
    if above:
        least = whole + 1 if excluded or bound != whole else whole
        return [f"{_from(least)}{_ZEROS}"]
    most = whole - 1 if excluded and bound == whole else whole
    return [f"{_up_to(most)}{_ZEROS}"] if most >= 0 else []


def _decimals(bound: Decimal, excluded: bool, above: bool) -> list[str]:
    whole = int(bound)
    fraction = format(bound - whole, "f").partition(".")[2].rstrip("0")
    if above:
        return [f"{_from(whole + 1)}{_FRACTION}", *_beside(whole, _greater(fraction, excluded))]
    found = [f"{_up_to(whole - 1)}{_FRACTION}"] if whole > 0 else []
    return [*found, *_beside(whole, _smaller(fraction, excluded))]


def _beside(whole: int, fractions: list[str]) -> list[str]:
    return [f"{whole}(?:{'|'.join(fractions)})"] if fractions else []


def _greater(digits: str, excluded: bool) -> list[str]:
    """Write the fractions that are not below the one of these digits; an absent fraction is zero."""
    found = [
        f"\\x2e{digits[:at]}{_digit(int(digits[at]) + 1, 9)}[0-9]*" for at in range(len(digits)) if digits[at] < "9"
    ]
    if excluded:
        return [*found, f"\\x2e{digits}[0-9]*[1-9][0-9]*"]
    return [*found, f"\\x2e{digits}[0-9]*"] if digits else [_FRACTION]


def _smaller(digits: str, excluded: bool) -> list[str]:
    """Write the fractions that are not above the one of these digits."""
    found = ["", "\\x2e0+"] if digits or not excluded else []
    for at, digit in enumerate(digits):
        if digit > "0":
            found.append(f"\\x2e{digits[:at]}{_digit(0, int(digit) - 1)}[0-9]*")
        if at:
            found.append(f"\\x2e{digits[:at]}")
    if digits and not excluded:
        found.append(f"\\x2e{digits}0*")
    return found


def _from(least: int) -> str:
    """The digits of the integers from one on that is not negative."""
    if least <= 0:
        return _WHOLE
    digits = str(least)
    longer = f"[1-9][0-9]{{{len(digits)},}}"
    if set(digits[1:]) <= {"0"} and digits[0] == "1":
        return f"[1-9][0-9]{{{len(digits) - 1},}}"
    return f"(?:{'|'.join([longer, *_same_length(digits, '9' * len(digits))])})"


def _up_to(most: int) -> str:
    """The digits of the integers from zero to one that is not negative."""
    digits = str(most)
    shorter = ["0", *([f"[1-9][0-9]{{0,{len(digits) - 2}}}"] if len(digits) > 1 else [])]
    first = "1" + "0" * (len(digits) - 1)
    return f"(?:{'|'.join([*shorter, *(_same_length(first, digits) if most else [])])})"


def _same_length(low: str, high: str) -> list[str]:
    """Expressions of the digits from one text to another of the same length."""
    if not low:
        return [""]
    if set(low[1:]) <= {"0"} and set(high[1:]) <= {"9"}:
        return [_digit(int(low[0]), int(high[0])) + _digits(len(low) - 1)]
    if low[0] == high[0]:
        return [low[0] + rest for rest in _same_length(low[1:], high[1:])]
    rest = len(low) - 1
    found = [low[0] + each for each in _same_length(low[1:], "9" * rest)]
    if int(low[0]) + 1 <= int(high[0]) - 1:
        found.append(_digit(int(low[0]) + 1, int(high[0]) - 1) + _digits(rest))
    return [*found, *(high[0] + each for each in _same_length("0" * rest, high[1:]))]


def _digit(low: int, high: int) -> str:
    return str(low) if low == high else f"[{low}-{high}]"


def _digits(count: int) -> str:
    return "" if not count else f"[0-9]{{{count}}}"
