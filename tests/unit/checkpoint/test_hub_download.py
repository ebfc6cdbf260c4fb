"""A hub id is downloaded where a hub answers, and refused in three lines where none does. The hub is a local one."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

SHA = "a" * 40
FILES = {
    "config.json": b'{"model_type": "ernie4_5"}',
    "model.safetensors": b"\x02\0\0\0\0\0\0\0{}",
    "modeling.py": b"raise SystemExit('code of a stranger')",
    "pytorch_model.bin": b"pickle",
}
CODE = "from erniekit.checkpoint.hub import resolve_model; print(resolve_model({!r}))"


class Hub(BaseHTTPRequestHandler):
    """What the hub client asks for: facts of a model, then each file by HEAD and GET."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/tiny"):
            files = [{"type": "file", "path": n, "rfilename": n, "size": len(c), "oid": SHA} for n, c in FILES.items()]
            facts = files if "/tree/" in path else {"id": "org/tiny", "sha": SHA, "siblings": files}
            return self._send(json.dumps(facts).encode(), "application/json")
        name = path.rpartition("/")[2]
        if path.startswith("/org/tiny/resolve/") and name in FILES:
            return self._send(FILES[name], "application/octet-stream")
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()
        return None

    do_HEAD = do_GET

    def _send(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()[:40]}"')
        self.send_header("X-Repo-Commit", SHA)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        """Nothing on the screen."""


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def resolve(name: str, folder: Path, endpoint: str) -> subprocess.CompletedProcess[str]:
    left = {n: v for n, v in os.environ.items() if not n.lower().endswith("_proxy") and not n.startswith("HF_")}
    env = {**left, "HF_HOME": str(folder / "hf"), "HF_ENDPOINT": endpoint, "NO_COLOR": "1"}
    code = CODE.format(name)
    return subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, timeout=60)


def test_a_hub_id_is_downloaded_once_without_code_or_pickles(hub: str, tmp_path: Path):
    done = resolve("org/tiny", tmp_path, hub)
    assert done.returncode == 0, done.stderr
    first, path = done.stdout.splitlines()
    assert first.startswith("download org/tiny from the Hugging Face hub")
    assert sorted(file.name for file in Path(path).iterdir()) == ["config.json", "model.safetensors"]
    assert resolve("org/tiny", tmp_path, "http://127.0.0.1:9").stdout.splitlines() == [path]  # from the cache


@pytest.mark.parametrize(
    ("name", "reachable", "what"),
    [
        ("org/absent", True, "is not on the Hugging Face hub, or is private"),
        ("org/tiny", False, "the Hugging Face hub cannot be reached"),
    ],
)
def test_what_the_hub_does_not_give_is_refused_by_reason(
    name: str, reachable: bool, what: str, hub: str, tmp_path: Path
):
    done = resolve(name, tmp_path, hub if reachable else "http://127.0.0.1:9")
    assert what in done.stderr


def test_a_mistyped_path_is_not_asked_of_the_hub(hub: str, tmp_path: Path):
    (tmp_path / "org").mkdir()
    done = resolve("org/tiny", tmp_path, hub)
    assert "neither a folder here nor in the download cache" in done.stderr
    assert not (tmp_path / "hf").exists()
