"""A small server that speaks the part of the hub's API that downloads of models need."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

ERRORS = {"gated": (403, "GatedRepo"), "no_token": (401, "GatedRepo"), "private": (401, "RepoNotFound")}


class Hub:
    """Repositories by id; every revision is a folder of files. Faults are by repository."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.faults: dict[str, str] = {}
        self.requests: list[tuple[str, str, str]] = []
        self.address = ""

    def add(self, repo: str, folder: Path, revision: str = "main") -> str:
        """Put a folder's files into a repository; its commit."""
        files = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
        commit = hashlib.sha1(repr(sorted((n, hashlib.sha256(b).hexdigest()) for n, b in files.items())).encode())
        revisions = self.repos.setdefault(repo, {})
        revisions[revision] = revisions.setdefault(commit.hexdigest(), files)
        return commit.hexdigest()

    def commit(self, repo: str, revision: str) -> str:
        files = self.repos[repo][revision]
        return next(name for name, other in self.repos[repo].items() if other is files and len(name) == 40)

    def downloads(self) -> list[str]:
        """Names of the files whose content was asked for."""
        return [path.rpartition("/")[2] for method, path, _ in self.requests if method == "GET" and "/resolve/" in path]


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append((self.command, path, self.headers.get("authorization", "")))
            parts = path.strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                name, rest = self.repo(parts[2:])
                kind, revision = [*rest, "revision", "main"][-2:] if len(rest) < 2 else rest[:2]
                return self.listing(name, kind, revision)
            name, rest = self.repo(parts)
            if len(rest) < 3:
                return self.answer(404, b"", {})
            return self.file(name, rest[1], "/".join(rest[2:]))

        do_HEAD = do_GET  # noqa: N815

        def repo(self, parts: list[str]) -> tuple[str, list[str]]:
            words = ("resolve", "revision", "tree")
            length = next((n for n, part in enumerate(parts) if part in words and n), len(parts))
            return "/".join(parts[:length]), parts[length:]

        def refused(self, name: str, revision: str) -> bool:
            fault = hub.faults.get(name, "")
            if fault in ERRORS:
                self.answer(ERRORS[fault][0], b"{}", {"X-Error-Code": ERRORS[fault][1], "X-Error-Message": fault})
            elif fault == "bad_token":
                said = {"X-Error-Message": "Invalid credentials in Authorization header"}
                self.answer(401, b"{}", said)
            elif fault.isdecimal():
                self.answer(int(fault), b"{}", {})
            elif name not in hub.repos:
                self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            elif revision not in hub.repos[name]:
                self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            else:
                return False
            return True

        def listing(self, name: str, kind: str, revision: str) -> None:
            if self.refused(name, revision):
                return
            files = hub.repos[name][revision]
            if kind == "tree":
                body: object = [
                    {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    | ({"lfs": self.lfs(content)} if is_large(path) else {})
                    for path, content in files.items()
                ]
            else:
                siblings = [{"rfilename": path} for path in files]
                body = {"id": name, "sha": hub.commit(name, revision), "siblings": siblings, "private": False}
            self.answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

        def lfs(self, content: bytes) -> dict[str, object]:
            return {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}

        def file(self, name: str, revision: str, path: str) -> None:
            if self.refused(name, revision):
                return
            if hub.faults.get(name) == "gated_files":
                self.answer(403, b"", {"X-Error-Code": "GatedRepo"})
                return
            commit, content = hub.commit(name, revision), hub.repos[name][revision].get(path)
            if content is None:
                self.answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
                return
            digest = hashlib.sha256(content).hexdigest()
            etag = digest if is_large(path) else hashlib.sha1(content).hexdigest()
            if hub.faults.get(name) == "damaged" and is_large(path):
                content = bytes([content[0] ^ 1]) + content[1:]
            self.answer(
                200,
                content,
                {"ETag": f'"{etag}"', "X-Repo-Commit": commit},
                cut=hub.faults.get(name) == "cut_off" and is_large(path),
            )

        def answer(self, status: int, body: bytes, headers: dict[str, str], *, cut: bool = False) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(
                    body[: len(body) // 2] if cut and "Range" not in self.headers else b"" if cut else body
                )
                if cut:
                    self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def is_large(path: str) -> bool:
    return path.endswith((".safetensors", ".bin", ".gguf"))


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(hub))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
    hub.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
