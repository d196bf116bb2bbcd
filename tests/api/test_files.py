"""Uploaded files: kept, listed, read, deleted; bounded, and nobody else's; forms that are wrong are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from support.batches import batching, begin, ended, line, lines_of, upload

pytestmark = pytest.mark.anyio


def error_of(reply: httpx.Response, status: int) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    error: dict[str, Any] = reply.json()["error"]
    return error


async def test_a_file_is_kept_as_it_came(tmp_path: Path) -> None:
    content = bytes(range(256)) * 9000  # more than is written at once
    async with batching(tmp_path) as client:
        file = (await upload(client, content)).json()
        assert file["id"].startswith("file-")
        assert (file["bytes"], file["filename"], file["purpose"]) == (len(content), "in.jsonl", "batch")
        assert (await client.get(f"/v1/files/{file['id']}")).json() == file
        assert (await client.get(f"/v1/files/{file['id']}/content")).content == content
    async with batching(tmp_path) as client:  # after a restart
        assert (await client.get(f"/v1/files/{file['id']}/content")).content == content
        deleted = await client.delete(f"/v1/files/{file['id']}")
        assert deleted.json() == {"id": file["id"], "object": "file", "deleted": True}
        for path in ("", "/content"):
            assert error_of(await client.get(f"/v1/files/{file['id']}{path}"), 404)["code"] == "file_not_found"
        assert list((tmp_path / "files").iterdir()) == []


async def test_files_are_listed_by_pages(tmp_path: Path) -> None:
    async with batching(tmp_path) as client:
        ids = {(await upload(client, b"x")).json()["id"] for _ in range(5)}
        seen: list[str] = []
        while True:
            after = {"after": seen[-1]} if seen else {}
            page = (await client.get("/v1/files", params={"limit": 2, "order": "asc", **after})).json()
            seen += [file["id"] for file in page["data"]]
            assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
            if not page["has_more"]:
                break
        assert len(seen) == 5
        assert set(seen) == ids
        newest = (await client.get("/v1/files")).json()["data"]
        assert [file["id"] for file in newest] == seen[::-1]
        assert (await client.get("/v1/files", params={"purpose": "batch_output"})).json()["data"] == []
        assert error_of(await client.get("/v1/files", params={"after": "file-none"}), 404)["code"] == "file_not_found"


async def test_one_keys_files_are_nobody_elses(tmp_path: Path) -> None:
    keys = ("ann=key-of-ann", "bob=key-of-bob")
    async with batching(tmp_path, api_key=keys, headers={"authorization": "Bearer key-of-ann"}) as client:
        bob = {"authorization": "Bearer key-of-bob"}
        file = (await upload(client, b"secret")).json()["id"]
        assert (await client.get("/v1/files", headers=bob)).json()["data"] == []
        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            assert (await client.request(method, f"/v1/files/{file}{path}", headers=bob)).status_code == 404
        asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        assert error_of(await client.post("/v1/batches", json=asked, headers=bob), 404)["param"] == "input_file_id"
        assert (await client.get(f"/v1/files/{file}")).status_code == 200
        assert (await client.post("/v1/files", headers={"authorization": "Bearer no"})).status_code == 401


async def test_sizes_are_bounded(tmp_path: Path) -> None:
    async with batching(tmp_path, max_file_bytes=1000, max_files_bytes=2500) as client:
        assert error_of(await upload(client, b"x" * 1001), 413)["code"] == "payload_too_large"
        assert error_of(await upload(client, b"x" * 200_000), 413)["code"] == "payload_too_large"
        first = (await upload(client, b"x" * 1000)).json()
        assert (await upload(client, b"x" * 1000)).status_code == 200
        assert error_of(await upload(client, b"x" * 1000), 400)["code"] == "file_quota_exceeded"
        assert (await client.delete(f"/v1/files/{first['id']}")).status_code == 200
        assert (await upload(client, b"x" * 1000)).status_code == 200
        assert len(list((tmp_path / "files").iterdir())) == 2, "nothing is left of what was refused"


async def test_a_file_with_a_time_is_kept_so_long(tmp_path: Path) -> None:
    async with batching(tmp_path) as client:
        times = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        file = (await upload(client, b"x", **times)).json()
        assert file["expires_at"] == file["created_at"] + 3600
        for wrong in ({"expires_after[anchor]": "now"}, {"expires_after[seconds]": "1"}):
            assert error_of(await upload(client, b"x", **{**times, **wrong}), 400)["param"] == next(iter(wrong))


async def test_an_input_that_is_read_is_not_deleted(tmp_path: Path) -> None:
    async with batching(tmp_path) as client:
        batch = await begin(client, [line("a", max_tokens=400)])
        path = f"/v1/files/{batch['input_file_id']}"
        assert error_of(await client.delete(path), 409)["code"] == "file_in_use"
        await ended(client, batch)
        assert (await client.delete(path)).status_code == 200


FORM = {"content-type": "multipart/form-data; boundary=b"}
PART = b'--b\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
FILE = PART % (b"file", b'; filename="a"', b"x")


@pytest.mark.parametrize(
    ("content", "headers", "status", "code"),
    [
        (b"{}", {"content-type": "application/json"}, 415, "unsupported_media_type"),
        (b"", {"content-type": "multipart/form-data"}, 415, "unsupported_media_type"),
        (b"", FORM, 400, "invalid_form"),
        (b"no form", FORM, 400, "invalid_form"),
        (FILE, FORM, 400, "invalid_form"),  # it ends early
        (b"--b\r\nContent-Disposition" + b"x" * 10_000, FORM, 400, "invalid_form"),
        (FILE + PART % (b"purpose", b"", b"batch" * 1000) + b"--b--", FORM, 400, "invalid_form"),
        (FILE + FILE + b"--b--", FORM, 400, "invalid_form"),
        (b"".join(PART % (b"%d" % n, b"", b"") for n in range(20)) + b"--b--", FORM, 400, "invalid_form"),
        (FILE + b"--b--", FORM, 400, "missing_required_parameter"),
        (PART % (b"purpose", b"", b"batch") + b"--b--", FORM, 400, "missing_required_parameter"),
        (FILE + PART % (b"purpose", b"", b"fine-tune") + b"--b--", FORM, 400, "unsupported_parameter"),
        (
            FILE + PART % (b"purpose", b"", b"batch") + PART % (b"x", b"", b"1") + b"--b--",
            FORM,
            400,
            "unknown_parameter",
        ),
    ],
)
async def test_wrong_forms_are_refused(
    tmp_path: Path, content: bytes, headers: dict[str, str], status: int, code: str
) -> None:
    async with batching(tmp_path) as client:
        reply = await client.post("/v1/files", content=content, headers=headers)
        assert error_of(reply, status)["code"] == code
        assert list((tmp_path / "files").iterdir()) == []


async def test_a_name_is_only_a_name(tmp_path: Path) -> None:
    async with batching(tmp_path) as client:
        form = PART % (b"file", b'; filename="../../\x07e\r"', b"x") + PART % (b"purpose", b"", b"batch") + b"--b--"
        reply = await client.post("/v1/files", content=form, headers=FORM)
        if reply.status_code == 200:
            assert "\x07" not in reply.json()["filename"]
        assert all(each.name.startswith("file-") for each in (tmp_path / "files").iterdir())
        weird = await client.post(
            "/v1/files", files={"file": ('a"b\n;é.jsonl', lines_of(line("a")))}, data={"purpose": "batch"}
        )
        content = await client.get(f"/v1/files/{weird.json()['id']}/content")
        assert content.status_code == 200
        assert "\n" not in content.headers["content-disposition"]


@pytest.mark.parametrize(("name", "shown"), [("../../etc/passwd", "passwd"), ("a\\b.exe", "b.exe"), ("..", "file")])
async def test_a_download_has_no_name_that_leads_elsewhere(name: str, shown: str, tmp_path: Path) -> None:
    async with batching(tmp_path) as client:
        form = {"files": {"file": (name, b"x")}, "data": {"purpose": "batch"}}
        file = (await client.post("/v1/files", **form)).json()
        header = (await client.get(f"/v1/files/{file['id']}/content")).headers["content-disposition"]
        assert header == f'attachment; filename="{shown}"'
        long = {"files": {"file": ("x" * 250, b"x")}, "data": {"purpose": "batch"}}
        file = (await client.post("/v1/files", **long)).json()
        assert len((await client.get(f"/v1/files/{file['id']}/content")).headers["content-disposition"]) < 150
