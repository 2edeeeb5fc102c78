"""A Hugging Face Hub that serves one folder, as far as huggingface_hub asks for it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


@dataclass
class FakeHub:
    """One model, `owner/tiny`."""

    folder: Path
    refusal: tuple[int, str] | None = None  # HTTP status and X-Error-Code of every answer
    fetched: list[str] = field(default_factory=list)  # files, in the order that they were read
    endpoint: str = ""

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body."""
        if self.refusal is not None:
            return self.refusal[0], {"X-Error-Code": self.refusal[1]}, b""
        if path.startswith("/api/models/owner/tiny/tree/"):
            return 200, {"Content-Type": "application/json"}, json.dumps(self._tree()).encode()
        if path.startswith("/api/models/owner/tiny"):
            info = {"id": "owner/tiny", "sha": COMMIT, "siblings": []}
            return 200, {"Content-Type": "application/json"}, json.dumps(info).encode()
        name = path.partition("/resolve/")[2].partition("/")[2]
        if path.startswith("/owner/tiny/resolve/") and (self.folder / name).is_file():
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{self._digest(name)}"'}
            return 200, headers, (self.folder / name).read_bytes()
        return 404, {"X-Error-Code": "RepoNotFound"}, b""

    def _tree(self) -> list[dict[str, object]]:
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return [
            {
                "type": "file",
                "path": (name := str(path.relative_to(self.folder))),
                "size": path.stat().st_size,
                "oid": self._digest(name),
            }
            for path in files
        ]

    def _digest(self, name: str) -> str:
        return hashlib.sha1((self.folder / name).read_bytes()).hexdigest()


@contextmanager
def serve_hub(folder: Path) -> Iterator[FakeHub]:
    hub = FakeHub(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.respond(with_body=False)

        def do_GET(self) -> None:
            self.respond(with_body=True)

        def respond(self, with_body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            status, headers, body = hub.answer(path)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                if "/resolve/" in path:
                    hub.fetched.append(path.rpartition("/resolve/")[2].partition("/")[2])
                self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        hub.endpoint = f"http://127.0.0.1:{server.server_port}"
        yield hub
        server.shutdown()
        thread.join()
