"""What the main process tells its API servers of tenants arrives as it was read."""

from __future__ import annotations

import pytest

from quire_server.api_servers.fleet import told_tenants
from quire_server.api_servers.server import tenants_told
from quire_server.settings.keys import TenantEntry

DIGEST = "0" * 64


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"weight": 2.5, "class": "batch", "prefix_group": "shared"},
        {"requests_per_minute": 0.5, "tokens_per_minute": 7.0, "max_queued": 1, "max_running": 2},
        {"tokens_per_day": 3, "tokens_per_month": 10**15},
    ],
)
def test_a_tenant_is_the_same_on_both_sides(fields: dict[str, object]) -> None:
    entry = TenantEntry.model_validate({"name": "acme", "key_sha256": [DIGEST, DIGEST[:-1] + "1"], **fields})
    assert tenants_told(told_tenants([entry])) == (entry,)
