"""Refuses requests that would make the server fetch remote files, or hold too much in memory."""

import json
from typing import Any

LARGEST = 2**20
"""Most bytes of a request; uploads of files take another path, with a limit of its own."""


class Guard:
    """ASGI middleware in front of the page."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or path.endswith("/upload"):
            await self.app(scope, receive, send)
        elif "file=http" in path or "/proxy=" in path:
            await _refuse(send, 403)
        elif scope["method"] != "POST":
            await self.app(scope, receive, send)
        else:
            body = await _read(receive)
            if body is None or _is_elsewhere(body):
                await _refuse(send, 413 if body is None else 403)
                return
            parts = iter([{"type": "http.request", "body": body, "more_body": False}])

            async def again() -> Any:
                return next(parts, None) or await receive()

            await self.app(scope, again, send)


async def _read(receive: Any) -> bytes | None:
    """The whole body of a request; None if it is too large."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
        if len(body) > LARGEST:
            return None
    return body


def _is_elsewhere(body: bytes) -> bool:
    """Whether the request names a file on another machine."""
    try:
        return _names_address(json.loads(body))
    except (ValueError, RecursionError):
        return False


def _names_address(value: Any) -> bool:
    if isinstance(value, dict):
        path = value.get("path")
        return (isinstance(path, str) and "://" in path) or any(map(_names_address, value.values()))
    return isinstance(value, list) and any(map(_names_address, value))


async def _refuse(send: Any, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b""})
