"""The few endpoints of the Hugging Face Hub that a download asks, served from a folder: `ORG/NAME/` has the files of a
repository, `datasets/ORG/NAME/` those of a data set's, all of one commit."""

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "c" * 40
REVISIONS = ("main", "v1.0", COMMIT)
REFUSED = {"org/gated": (403, "GatedRepo"), "org/busy": (503, ""), "org/private": (401, "RepoNotFound")}
"""Repositories that answer with a status, and the header that says why."""


class LocalHub:
    """`url` is its HF_ENDPOINT; `fetched` are the files whose content was asked for, in order, and `sent` the bytes of
    each that were. Without `ranges` it sends whole files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.fetched, self.sent, self.ranges = folder, list[str](), Counter[str](), True
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self, with_body=True)

            def do_POST(self) -> None:
                hub.answer(self, with_body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, with_body=False)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, request: BaseHTTPRequestHandler, *, with_body: bool) -> None:
        parts = unquote(urlsplit(request.path).path).strip("/").split("/")
        parts = parts[1:] if parts[0] == "api" else parts
        parts = parts[1:] if parts[0] == "models" else parts
        at = 3 if parts[0] == "datasets" else 2
        repo = "/".join(parts[:at])
        kind, revision, *path = parts[at:] or ["revision", "main"]
        files = {
            str(file.relative_to(self.folder / repo)): file
            for file in (self.folder / repo).rglob("*")
            if file.is_file()
        }
        status, why, body, headers = 200, "", b"", {}
        if repo in REFUSED or not files:
            status, why = REFUSED.get(repo, (404, "RepoNotFound"))
        elif revision not in REVISIONS:
            status, why = 404, "RevisionNotFound"
        elif kind == "revision":
            listed = [{"rfilename": name, "size": file.stat().st_size} for name, file in sorted(files.items())]
            body = json.dumps({"id": repo, "modelId": repo, "sha": COMMIT, "siblings": listed}).encode()
        elif kind in ("tree", "paths-info"):
            below = {str(parent): parent for name in files for parent in Path(name).parents} | files
            if kind == "paths-info":
                wanted = parse_qs(request.rfile.read(int(request.headers["Content-Length"])).decode())["paths"]
            elif "recursive=false" in request.path:
                wanted = [name for name in below if name != "." and Path(name).parent == Path(*path)]
            else:
                wanted = [*files]
            body = json.dumps([_entry(name, files.get(name)) for name in sorted(wanted) if name in below]).encode()
        elif kind == "resolve" and (name := "/".join(path)) in files:
            body = files[name].read_bytes()
            headers = {"ETag": f'"{_oid(files[name])}"', "X-Repo-Commit": COMMIT, "X-Linked-Size": str(len(body))}
            if self.ranges and (asked := re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", ""))):
                first, last = int(asked[1]), min(int(asked[2]), len(body) - 1)
                status, headers["Content-Range"] = 206, f"bytes {first}-{last}/{len(body)}"
                body = body[first : last + 1]
            if with_body:
                self.fetched.append(name)
                self.sent[name] += len(body)
        else:
            status, why = 404, "EntryNotFound"
        request.send_response(status)
        for key, value in {"X-Error-Code": why, "Content-Length": str(len(body)), **headers}.items():
            if value:
                request.send_header(key, value)
        request.end_headers()
        if with_body:
            request.wfile.write(body)


def _entry(name: str, file: Path | None) -> dict[str, Any]:
    if file is None:
        return {"type": "directory", "path": name, "oid": "e" * 40}
    return {"type": "file", "path": name, "size": file.stat().st_size, "oid": _oid(file)}


def _oid(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@contextmanager
def local_hub(folder: Path) -> Iterator[LocalHub]:
    hub = LocalHub(folder)
    thread = threading.Thread(target=hub.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.server.shutdown()
        hub.server.server_close()
        thread.join()
