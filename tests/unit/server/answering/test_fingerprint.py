"""system_fingerprint: the same for equal servers, another wherever answers could differ."""

from typing import Any

import pytest

from quire_server.answering.rendering import fingerprint
from support.fake_engine_process import make_plan
from support.plans import changed


def test_it_does_not_depend_on_where_the_model_lies() -> None:
    assert fingerprint(make_plan("/models/a/tiny")) == fingerprint(make_plan("/srv/tiny"))


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"path": "/models/other"}},
        {"model": {"num_parameters": 5}},
        {"model": {"dtype": "bfloat16"}},
        {"machine": {"kernels": "cpu"}},
        {"machine": {"cpu_variant": "avx2"}},
        {"model": {"quantization": "int8"}},
        {"pool": {"dtype": "int8"}},
        {"machine": {"deterministic": True}},
    ],
    ids=str,
)
def test_it_changes_with_what_changes_answers(change: dict[str, dict[str, Any]]) -> None:
    plan = make_plan("/models/tiny")
    assert fingerprint(changed(plan, **change)) != fingerprint(plan)
