"""The syntax of injected faults for tests: `step.raise@5,oom@seed=7`.

Promises: every fault of an accepted text exists.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, get_args

from pydantic import AfterValidator

from quire_engine.contract.config import STEP_POINTS, Fault, FaultPoint

_POINTS: tuple[FaultPoint, ...] = get_args(FaultPoint)
_FAULT = re.compile(r"([a-z.]+)(?:@(?:([1-9]\d*)|seed=(-?\d+)))?")


def parse_faults(text: str) -> tuple[Fault, ...]:
    """The faults of a list. Raises ValueError with an example of a valid one."""
    faults = []
    for part in filter(None, map(str.strip, text.split(","))):
        found = _FAULT.fullmatch(part)
        point = next((point for point in _POINTS if found is not None and found[1] == point), None)
        if found is None or point is None:
            raise ValueError(f"{part!r} is no fault; expected POINT, POINT@N or POINT@seed=N of {', '.join(_POINTS)}")
        if found[3] is not None and point not in STEP_POINTS:
            raise ValueError(f"{point} cannot be tied to a seed; those can: {', '.join(STEP_POINTS)}")
        faults.append(Fault(point=point, nth=int(found[2] or 0), seed=None if found[3] is None else int(found[3])))
    return tuple(faults)


def is_loopback(host: str) -> bool:
    """Whether a listen address can be reached from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _checked(text: str) -> str:
    parse_faults(text)
    return text


FaultList = Annotated[str, AfterValidator(_checked)]
