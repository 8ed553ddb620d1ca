"""Restricts Gradio's web server to the paths that the page uses and to requests that name this host."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from accel_scale.board.environment import served_folder

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Gradio serves many more: proxies, a program editor, recordings, third-party components.
_OPEN = re.compile(
    r"/|/config/?|/theme\.css|/favicon\.ico|/manifest\.json|/robots\.txt|/(?:assets|static|svelte)/[\w./@-]+"
    r"|/gradio_api/(?:queue/(?:join|data)|upload|upload_progress|startup-events|cancel|theme\.css|heartbeat/\w+)"
)
_FILE = "/gradio_api/file="
# Gradio's page evaluates its own templates. Nothing is loaded from elsewhere.
_POLICY = (
    "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; object-src 'none'; form-action 'self'; "
    "base-uri 'self'; frame-ancestors 'self' https://huggingface.co"
)
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", _POLICY.encode()),
)


class OnlyThePage:
    """ASGI middleware that answers 404 to every path that the page does not use.

    Args:
        app: The wrapped application.
        hosts: Host names allowed in requests and in the origins of their pages; empty allows any. With a list, a page
            of another site whose name resolves to this machine cannot use the board.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str] = ()) -> None:
        self._app, self._hosts = app, frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refusal = self._refusal(scope)
            if refusal is not None:
                await _answer(send, *refusal)
                return
        elif scope["type"] == "websocket":
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
            await send(message)

        await self._app(scope, receive, with_headers)

    def _refusal(self, scope: Scope) -> tuple[int, bytes] | None:
        headers = dict(scope["headers"])
        if self._hosts:
            named = [f"//{headers.get(b'host', b'').decode('latin-1')}"]
            if b"origin" in headers:
                named.append(headers[b"origin"].decode("latin-1"))
            if not all(_host(url) in self._hosts for url in named):
                return 403, b"This board answers to this machine only.\n"
        path = scope["path"]
        is_open = _is_served(path.removeprefix(_FILE)) if path.startswith(_FILE) else _OPEN.fullmatch(path)
        if not is_open or ".." in path.split("/") or "\0" in path:
            return 404, b"Not found.\n"
        return None


def _is_served(name: str) -> bool:
    """True if the file, with links resolved, is an upload or was made for download."""
    if "\0" in name:
        return False
    return Path(os.path.realpath(name)).is_relative_to(os.path.realpath(served_folder()))


def _host(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


async def _answer(send: Send, status: int, text: bytes) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(text)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *_HEADERS]})
    await send({"type": "http.response.body", "body": text})
