"""system_fingerprint: the same for equal servers, another wherever answers could differ."""

from dataclasses import replace

import pytest

from quire_server.answering.rendering import fingerprint
from support.fake_engine_process import make_plan


def test_it_does_not_depend_on_where_the_model_lies() -> None:
    assert fingerprint(make_plan("/models/a/tiny")) == fingerprint(make_plan("/srv/tiny"))


@pytest.mark.parametrize(
    "change",
    [
        {"model": "/models/other"},
        {"num_parameters": 5},
        {"dtype": "bfloat16"},
        {"kernels": "cpu"},
        {"cpu_variant": "avx2"},
        {"quantization": "int8"},
        {"kv_cache_dtype": "int8"},
        {"deterministic": True},
    ],
    ids=str,
)
def test_it_changes_with_what_changes_answers(change: dict[str, object]) -> None:
    plan = make_plan("/models/tiny")
    assert fingerprint(replace(plan, **change)) != fingerprint(plan)  # type: ignore[arg-type]
