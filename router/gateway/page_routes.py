"""The page at /: a playground and a live view, plain files out of the package."""

from __future__ import annotations

from importlib.resources import files
from typing import Final

from aiohttp import web

_TYPES: Final = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}
# The page takes nothing from anywhere else, and is shown in nobody's frame.
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class PageRoutes:
    """Serves the page's files, which hold nothing of the deployment."""

    def __init__(self) -> None:
        folder = files(__package__) / "page"
        self._files = {each.name: each.read_bytes() for each in folder.iterdir() if each.is_file()}

    def index(self) -> web.Response:
        """Return the page itself."""
        return self._file("index.html")

    async def file(self, request: web.Request) -> web.Response:
        """GET /page/{name}"""
        name = request.match_info["name"]
        if name not in self._files:
            raise web.HTTPNotFound
        return self._file(name)

    def _file(self, name: str) -> web.Response:
        kind = _TYPES[name.rpartition(".")[2]]
        return web.Response(
            body=self._files[name], content_type=kind, charset="utf-8", headers=_HEADERS
        )


def wants_page(request: web.Request) -> bool:
    """Whether it is a browser that asks."""
    return request.path == "/" and "text/html" in request.headers.get("Accept", "")
