"""`ironhorse fetch` and huggingface_hub with one cache between them, and a hub on this machine. Needs IRONHORSE_BIN."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub")

COMMIT = "89abcdef" * 5
FILES = {
    "config.json": b'{"model_type": "gpt2"}',
    "generation_config.json": b"{}",
    "model.safetensors": bytes(range(256)) * 1000,
    "tokenizer.json": b'{"version": "1.0"}',
}


@dataclass
class Hub:
    """What the server was asked for, and where it is."""

    address: str = ""
    asked: list[str] = field(default_factory=list)

    def environment(self, home: Path) -> dict[str, str]:
        """For a process that uses this hub and the cache in `home`."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        own = {"HF_ENDPOINT": self.address, "HF_HOME": str(home), "IRONHORSE_CACHE": str(home / "own")}
        return {**kept, **own, "NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A model `org/name`: its list, and its files with the hub's headers."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer(False)

        def do_GET(self) -> None:
            self.answer(True)

        def answer(self, with_body: bool) -> None:
            hub.asked.append(f"{self.command} {self.path}")
            path = self.path.split("?")[0]
            headers: dict[str, str] = {"X-Repo-Commit": COMMIT}
            if path.startswith("/api/models/org/name/tree/"):
                body = json.dumps([entry(name) for name in FILES]).encode()
            elif path.startswith("/api/models/org/name"):
                siblings = [{"rfilename": name} for name in FILES]
                info = {"_id": "0", "id": "org/name", "modelId": "org/name", "sha": COMMIT, "siblings": siblings}
                body = json.dumps({**info, "private": False, "tags": [], "downloads": 0, "likes": 0}).encode()
            else:
                body = FILES[path.rsplit("/", 1)[-1]]
                if path.endswith(".safetensors"):
                    headers["X-Linked-Etag"] = f'"{hashlib.sha256(body).hexdigest()}"'
                    headers["X-Linked-Size"] = str(len(body))
                headers["ETag"] = f'"{git_blob(body)}"'
            self.send_response(200)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield hub
    server.shutdown()


def git_blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def entry(name: str) -> dict[str, object]:
    """A file in the hub's list of a folder."""
    made: dict[str, object] = {"type": "file", "path": name, "size": len(FILES[name]), "oid": git_blob(FILES[name])}
    if name.endswith(".safetensors"):
        oid = hashlib.sha256(FILES[name]).hexdigest()
        made["lfs"] = {"oid": oid, "size": len(FILES[name]), "pointerSize": 134}
    return made


def run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip().splitlines()[-1]


def python(code: str, environment: dict[str, str]) -> str:
    return run([sys.executable, "-c", code], environment)


def ironhorse(environment: dict[str, str], *arguments: str) -> str:
    return run([os.environ["IRONHORSE_BIN"], *arguments], environment)


DOWNLOAD = "from huggingface_hub import snapshot_download as d; print(d('org/name'))"
CACHED = """
from huggingface_hub import hf_hub_download, scan_cache_dir, snapshot_download
for name in ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]:
    hf_hub_download("org/name", name)
[repo] = scan_cache_dir().repos
[revision] = repo.revisions
assert not scan_cache_dir().warnings, scan_cache_dir().warnings
assert (repo.repo_id, repo.nb_files, revision.refs) == ("org/name", 4, frozenset({"main"})), repo
print(snapshot_download("org/name"))
"""


def test_huggingface_hub_finds_what_fetch_downloaded(hub: Hub, tmp_path: Path) -> None:
    environment = hub.environment(tmp_path)
    folder = ironhorse(environment, "fetch", "org/name")
    assert folder == str(tmp_path / "hub/models--org--name/snapshots" / COMMIT)
    hub.asked.clear()
    assert python(CACHED, {**environment, "HF_HUB_OFFLINE": "1"}) == folder
    assert not hub.asked
    # with the network it asks, but downloads nothing again
    assert python(DOWNLOAD, environment) == folder
    assert not [line for line in hub.asked if line.startswith("GET") and "/resolve/" in line]


def test_fetch_finds_what_huggingface_hub_downloaded(hub: Hub, tmp_path: Path) -> None:
    environment = hub.environment(tmp_path)
    folder = python(DOWNLOAD, environment)
    before = sorted(path for path in Path(folder).parents[1].rglob("*"))
    hub.asked.clear()
    offline = {**environment, "HF_HUB_OFFLINE": "1"}
    assert ironhorse(offline, "fetch", "org/name") == folder
    assert not hub.asked
    assert ironhorse(environment, "fetch", "org/name") == folder
    assert hub.asked == ["GET /api/models/org/name/revision/main"]
    assert sorted(path for path in Path(folder).parents[1].rglob("*")) == before
    assert (Path(folder) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
