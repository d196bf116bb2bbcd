"""/v1/files: the inputs and outputs of batches, in OpenAI's form. A file is its owner's alone."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse
from pydantic import BaseModel, ConfigDict

from quire_server.batches.records import INPUT, StoredFile
from quire_server.batches.store import MAX_FILES
from quire_server.errors import (
    BadRequest,
    Conflict,
    FileNotFound,
    PayloadTooLarge,
    RequestTimeout,
    Unsupported,
    UnsupportedMediaType,
)
from quire_server.http.openapi import error_response
from quire_server.http.upload import Form, read_form
from quire_server.routes.batches import BatchService, Listed, Page, owner_of, service_of, too_many_files

router = APIRouter(prefix="/v1/files", tags=["batches"])

LEAST_KEPT, MOST_KEPT = 3600, 30 * 86_400  # seconds that `expires_after` may ask for
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_MOST_NAME = 100  # characters in the header of a download
_FIELDS = ("file", "purpose", _ANCHOR, _SECONDS)
NOT_FOUND: dict[int | str, dict[str, Any]] = {FileNotFound.status: error_response(FileNotFound)}
_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
                        "purpose": {"const": INPUT},
                        _ANCHOR: {"const": "created_at"},
                        _SECONDS: {"type": "integer", "minimum": LEAST_KEPT, "maximum": MOST_KEPT},
                    },
                }
            }
        },
    }
}


class FileObject(Listed):
    model_config = ConfigDict(extra="forbid")

    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: None


class FileList(Page[FileObject]):
    pass


class DeletedFile(BaseModel):
    id: str
    object: Literal["file"]
    deleted: bool


_UPLOAD: dict[int | str, dict[str, Any]] = {
    each.status: error_response(each) for each in (FileNotFound, PayloadTooLarge, UnsupportedMediaType, RequestTimeout)
}


@router.post("", openapi_extra=_FORM, responses=_UPLOAD)
async def upload_file(request: Request) -> FileObject:
    """Keep the input of a batch: one request a line."""
    service, owner = service_of(request), owner_of(request)
    store = service.store
    begun = await store.run(store.begin_upload, owner.name)
    if begun is None:
        raise too_many_files(MAX_FILES)
    file_id, content = begun
    is_kept = False
    try:

        async def write(piece: bytes) -> None:
            if not await store.run(store.reserve, file_id, len(piece)):
                raise _over_quota(store.max_bytes)
            await asyncio.to_thread(content.write, piece)

        form = await read_form(request, "file", write, max_bytes=service.max_file_bytes)
        kept_seconds = _checked(form)
        now = store.now()
        file = StoredFile(
            id=file_id,
            owner=owner.name,
            name=form.file_name or "file",
            purpose=INPUT,
            num_bytes=form.num_bytes,
            created_at=now,
            expires_at=None if kept_seconds is None else now + kept_seconds,
        )
        is_kept = await store.run(store.add_file, file, content)
        if not is_kept:
            raise _over_quota(store.max_bytes)
    finally:
        if not is_kept:
            await store.run(store.drop_content, file_id, content)
    return FileObject(**file.shown())


@router.get("", responses=NOT_FOUND)
async def list_files(
    request: Request,
    purpose: Annotated[str | None, Query(max_length=64)] = None,
    after: Annotated[str | None, Query(max_length=64)] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
) -> FileList:
    """List the files of this key."""
    service, owner = service_of(request), owner_of(request)
    last = None if after is None else await _known(service, owner.name, after)

    def read() -> list[StoredFile]:
        return service.store.files(
            owner.name, purpose=purpose, after=last, limit=limit + 1, newest_first=order == "desc"
        )

    return FileList.of([FileObject(**each.shown()) for each in await service.store.run(read)], limit)


@router.get("/{file_id}", responses=NOT_FOUND)
async def retrieve_file(file_id: str, request: Request) -> FileObject:
    """Return what is known of a file."""
    file = await _known(service_of(request), owner_of(request).name, file_id)
    return FileObject(**file.shown())


@router.get(
    "/{file_id}/content",
    response_class=FileResponse,
    responses={
        200: {"content": {"application/octet-stream": {}}, "description": "the file, as it was written"},
        **NOT_FOUND,
    },
)
async def file_content(file_id: str, request: Request) -> FileResponse:
    """Return the content of a file."""
    service = service_of(request)
    file = await _known(service, owner_of(request).name, file_id)
    return FileResponse(
        service.store.content(file.id), media_type="application/octet-stream", filename=_download_name(file.name)
    )


@router.delete("/{file_id}", responses={**NOT_FOUND, Conflict.status: error_response(Conflict)})
async def delete_file(file_id: str, request: Request) -> DeletedFile:
    """A file that an unfinished batch reads is not deleted."""
    service, owner = service_of(request), owner_of(request)
    await _known(service, owner.name, file_id)
    if not await service.store.run(service.store.delete_file, owner.name, file_id):
        raise Conflict("A batch that has not ended reads this file; cancel it first.", code="file_in_use")
    return DeletedFile(id=file_id, object="file", deleted=True)


def _over_quota(most: int) -> BadRequest:
    return BadRequest(
        f"With this file yours, those under way and results of batches would have more than {most} bytes; delete some.",
        code="file_quota_exceeded",
    )


def _download_name(name: str) -> str:
    """The last part of a name that an uploader has chosen, as a name for the downloaded file."""
    return name.replace("\\", "/").rpartition("/")[2][:_MOST_NAME].strip(". ") or "file"


def _checked(form: Form) -> int | None:
    """Check a form, and return for how many seconds the file is kept; None: until it is deleted. Raises BadRequest."""
    unknown = next((name for name in form.fields if name not in _FIELDS), None)
    if unknown is not None:
        raise BadRequest(f"unknown field '{unknown[:64]}'", param=unknown[:64], code="unknown_parameter")
    if form.file_name is None:
        raise BadRequest("The form has no 'file'.", param="file", code="missing_required_parameter")
    purpose = form.fields.get("purpose")
    if purpose is None:
        raise BadRequest("The form has no 'purpose'.", param="purpose", code="missing_required_parameter")
    if purpose != INPUT:
        raise Unsupported(f"Files are kept for batches: 'purpose' must be '{INPUT}'.", param="purpose")
    anchor, seconds = form.fields.get(_ANCHOR), form.fields.get(_SECONDS)
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise BadRequest("'expires_after[anchor]' must be 'created_at'.", param=_ANCHOR)
    if seconds is None or not seconds.isascii() or not seconds.isdigit() or len(seconds) > 9:
        raise BadRequest("'expires_after[seconds]' must be a number of seconds.", param=_SECONDS)
    if not LEAST_KEPT <= int(seconds) <= MOST_KEPT:
        raise BadRequest(f"'expires_after[seconds]' must be from {LEAST_KEPT} to {MOST_KEPT}.", param=_SECONDS)
    return int(seconds)


async def _known(service: BatchService, owner: str, file_id: str) -> StoredFile:
    file = await service.store.run(service.store.file, owner, file_id)
    if file is None:
        raise FileNotFound(file_id)
    return file
