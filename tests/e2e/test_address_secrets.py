"""Signatures and passwords of addresses: used, and neither printed nor stored; a new signature is the same data."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from shutil import rmtree

import pytest

from erniekit.cli.main import main


class Store(BaseHTTPRequestHandler):
    content, valid = b"", ""

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        signed = f"X-Amz-Signature={self.valid}" in self.path
        self.send_response(200 if signed or self.headers.get("Authorization") else 403)
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(self.content)

    do_HEAD = do_GET


@pytest.fixture
def store(rows: Path) -> Iterator[tuple[str, type[Store]]]:
    handler = type("OneStore", (Store,), {"content": rows.read_bytes()})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"127.0.0.1:{server.server_port}", handler
        server.shutdown()


def test_what_opens_an_address_is_neither_printed_nor_stored(
    store, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    """A file that is streamed is trained on, and one of the token cache evaluated."""
    host, handler = store
    monkeypatch.setenv("ERNIEKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    output, secrets = tmp_path / "run", ["s1gnature-one", "s1gnature-two", "sesame-word"]

    def train(signature: str) -> int:
        handler.valid = signature
        url = f"http://{host}/rows.jsonl?X-Amz-Date={len(signature)}&X-Amz-Signature={signature}"
        keys = [word for word in words if not word.startswith(("train_dataset_path", "max_steps"))]
        keys += [f"train_dataset_path={url}", f"eval_dataset_path=http://me:sesame-word@{host}/rows.jsonl"]
        return main(["train", *keys, f"output_dir={output}", "max_steps=2", "streaming=True"])

    assert train(secrets[0]) == 0
    rmtree(output / "checkpoint-2")
    assert train(secrets[1]) == 0
    told = capfd.readouterr()
    assert "checkpoint-1 at step 1" in told.out
    assert "rows.jsonl?***" in told.out
    assert main(["train", str(output / "recipe.yaml"), "output_dir=again"]) == 2
    refused = capfd.readouterr().err
    assert "stored without its password or signature" in refused
    assert "fix:   give it again in full: train_dataset_path=URL" in refused
    assert "train_dataset_path is stored without its password or signature" in (output / "recipe.yaml").read_text()
    assert main(["data", f"http://{host}/rows.jsonl?X-Amz-Signature={secrets[1]}"]) == 0
    assert main(["config", f"train_dataset_path=http://me:{secrets[2]}@{host}/rows.jsonl"]) == 0
    told = told.out + told.err + refused + "".join(capfd.readouterr())
    assert not [word for word in secrets if word in told]
    files = [path for folder in (output, tmp_path / "cache") for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not [(path, word) for path in files for word in secrets if word.encode() in path.read_bytes()]
