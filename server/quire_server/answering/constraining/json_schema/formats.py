"""Formats of strings as patterns, by the standards that JSON Schema names for them."""

from __future__ import annotations

_DAY_OF_MONTH = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_YEAR = r"(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"  # no calendar of programs has a year 0
_IN_CENTURY = r"(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = rf"(?:[0-9]{{2}}{_IN_CENTURY}|{_IN_CENTURY}00)"
_DATE = rf"(?:{_YEAR}-{_DAY_OF_MONTH}|{_LEAP_YEAR}-02-29)"
_OFFSET = r"(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_PART_OF_SECOND = r"(?:\.[0-9]+)?"
_TIME = (
    rf"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]{_PART_OF_SECOND}{_OFFSET}"
    rf"|23:59:60{_PART_OF_SECOND}(?:[Zz]|[+-]00:00))"
)
_CLOCK = r"T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_CALENDAR = r"(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL})*"
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_GROUP = r"[0-9A-Fa-f]{1,4}"


def _ipv6() -> str:
    """All groups, or a gap that stands for at least one, with an IPv4 address in place of the last two or not."""
    found = [rf"(?:{_GROUP}:){{7}}{_GROUP}", rf"(?:{_GROUP}:){{6}}{_IPV4}"]
    for before in range(8):
        head = rf"{_GROUP}(?::{_GROUP}){{{before - 1}}}" if before else ""
        room = 7 - before
        found.append(rf"{head}::" + (rf"(?:{_GROUP}(?::{_GROUP}){{0,{room - 1}}})?" if room else ""))
        if room >= 2:
            found.append(rf"{head}::(?:{_GROUP}:){{0,{room - 2}}}{_IPV4}")
    return f"(?:{'|'.join(found)})"


_ESCAPED = r"%[0-9A-Fa-f]{2}"
_URI_CHARACTER = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|{_ESCAPED})"
_USER = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:-]|{_ESCAPED})*@"
_NAMED_HOST = rf"(?:[A-Za-z0-9._~!$&'()*+,;=-]|{_ESCAPED})*"
_AUTHORITY = rf"(?:{_USER})?(?:\[{_ipv6()}\]|{_NAMED_HOST})(?::[0-9]*)?"
_PATH = rf"(?:/{_URI_CHARACTER}*)*"
_HIERARCHY = rf"(?://{_AUTHORITY}{_PATH}|/(?:{_URI_CHARACTER}+{_PATH})?|{_URI_CHARACTER}+{_PATH}|)"
_QUERY = rf"(?:{_URI_CHARACTER}|[/?])*"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"

# Every pattern is of whole texts. Each format: its pattern, and the greatest length that the standard gives.
FORMATS: dict[str, tuple[str, int | None]] = {
    "date-time": (rf"^{_DATE}[Tt]{_TIME}$", None),
    "time": (rf"^{_TIME}$", None),
    "date": (rf"^{_DATE}$", None),
    "duration": (rf"^P(?:[0-9]+W|{_CALENDAR}(?:{_CLOCK})?|{_CLOCK})$", None),
    "email": (rf"^{_ATOM}(?:\.{_ATOM})*@{_HOSTNAME}$", None),
    "hostname": (rf"^{_HOSTNAME}$", 253),
    "ipv4": (rf"^{_IPV4}$", None),
    "ipv6": (rf"^{_ipv6()}$", None),
    "uuid": (r"^[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$", None),
    "uri": (rf"^[A-Za-z][A-Za-z0-9+.-]*:{_HIERARCHY}(?:\?{_QUERY})?(?:#{_QUERY})?$", None),
}
