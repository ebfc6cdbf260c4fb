"""W2 and W3: the real page on a real port, asked without its token and sent files that are not its own."""

from __future__ import annotations

import base64
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio", reason="the page needs gradio: pip install -e '.[webui]'")
pytest.importorskip("uvicorn")

from faults.page_server import JOIN, TOKEN, UPLOAD, Door, Served, served
from faults.results import fault

pytestmark = pytest.mark.xdist_group("webui requests")
SECRET = "a-secret-nobody-may-read"
META = {"meta": {"_type": "gradio.FileData"}}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("page")) as page:
        yield page


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A recipe of somebody: read as one, its value would be told in the error."""
    path = tmp_path / "secret.yaml"
    path.write_text(f"learning_rate: {SECRET}\n")
    return path


class Listener:
    """Counts who connects: a URL that is fetched."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}/secret.yaml"
        self.count = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                self.socket.accept()[0].close()
            except OSError:
                return
            self.count += 1

    def knocked(self) -> int:
        """Connections so far, after one of our own has come through: none before it is still under way."""
        before = self.count
        socket.create_connection(self.socket.getsockname()).close()
        end = time.monotonic() + 30
        while self.count == before and time.monotonic() < end:
            time.sleep(0.01)
        self.count -= 1
        return self.count


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.socket.shutdown(socket.SHUT_RDWR)
    listener.socket.close()


def foreign(page: Served, secret: Path, url: str) -> dict[str, str]:
    """Paths and URLs of files that nobody uploaded."""
    up = "../" * 30
    (page.uploads / "folder").mkdir(exist_ok=True)
    for name, target in (("link.yaml", secret), ("behind", secret.parent), ("folder/link.yaml", secret)):
        if not (page.uploads / name).is_symlink():
            (page.uploads / name).symlink_to(target)
    return {
        "absolute": str(secret),
        "system": "/etc/passwd",
        "relative": f"{up}{str(secret)[1:]}",
        "climbs": f"{page.uploads}/{up}{str(secret)[1:]}",
        "link": str(page.uploads / "link.yaml"),
        "link below": str(page.uploads / "folder" / "link.yaml"),
        "behind a link": str(page.uploads / "behind" / secret.name),
        "folder": str(secret.parent),
        "process": "/proc/self/environ",
        "data": "data:text/yaml;base64," + base64.b64encode(b"learning_rate: x").decode(),
        "http": url,
        "http in capitals": url.replace("http", "HTTP", 1),
        "http by name": url.replace("127.0.0.1", "localhost"),
        "file": f"file://{secret}",
        "nothing": "",
        "nul": f"{secret}\x00.yaml",
    }


def takes_files(block: Any) -> bool:
    model = getattr(block, "data_model", None)
    return model is not None and "FileData" in json.dumps(model.model_json_schema())


def file_inputs(page: Served) -> list[tuple[int, int, str]]:
    """(event, which input, kind) of every component that is made to take a file."""
    return [
        (fn, at, type(block).__name__)
        for fn, event in page.page.fns.items()
        for at, block in enumerate(event.inputs)
        if takes_files(block)
    ]


def other_inputs(page: Served) -> list[tuple[int, int, str]]:
    """One event for each other kind: gradio opens what looks like a file in the value of any component."""
    found: dict[str, tuple[int, int, str]] = {}
    for fn, event in page.page.fns.items():
        for at, block in enumerate(event.inputs):
            kind = type(block).__name__
            if not takes_files(block) and not block.stateful and event.fn is not None:
                found.setdefault(kind, (fn, at, kind))
    return list(found.values())


def data_of(page: Served, fn: int, at: int, value: Any) -> list[Any]:
    data = [None if block.stateful else getattr(block, "value", None) for block in page.page.fns[fn].inputs]
    data = [None if callable(one) else one for one in data]
    data[at] = value
    return data


def leaks(page: Served, text: str) -> list[str]:
    """Where the secret has come to: the reply, or files that the page would serve."""
    found = ["the reply"] if SECRET in text or "root:x:" in text else []
    for path in page.uploads.rglob("*"):
        if path.is_file() and not path.is_symlink() and SECRET.encode() in path.read_bytes():
            found.append(f"{path} in the folder of uploads")
    return found


def shapes(path: str, url: str) -> list[Any]:
    """One file; the same inside a list, without its mark, and as part of a conversation."""
    file = {"path": path, "orig_name": "a.yaml", **META}
    return [
        file,
        [file],
        {"path": path, "url": url, "orig_name": "a.yaml"},
        [{"role": "user", "content": [{"type": "file", "file": file}]}],
        [{"role": "user", "content": [{"type": "component", "component": "file", "value": file}]}],
    ]


def attempts(
    page: Served, made_for_it: list[tuple[int, int, str]], paths: dict[str, str], url: str, door: str
) -> Iterator[tuple[int, int, str, str, Any]]:
    """All paths in all shapes for one component that takes files; the worst of them for the others, as gradio's queue
    takes its time with each."""
    worst = ("absolute", "climbs", "link", "http")
    for number, (fn, at, kind) in enumerate([*made_for_it, *other_inputs(page)]):
        everything = door == "guarded" or number == 0
        for name in paths if everything else worst if number < len(made_for_it) else worst[::3]:
            for value in shapes(paths[name], url)[: None if everything and name in worst[::3] else 1]:
                yield fn, at, kind, name, value


@pytest.mark.parametrize("door", ["guarded", "bare"])
def test_no_component_of_the_page_takes_a_file_that_was_not_uploaded(
    page: Served, secret: Path, listener: Listener, door: str
) -> None:
    made_for_it = file_inputs(page)
    kinds = sorted(kind for _, _, kind in made_for_it)  # recipes, data; pictures of the Chat tab, in three events
    assert kinds == ["UploadButton"] * 8, "another component that takes files"
    where: Door = getattr(page, door)
    layer = "the page" if door == "guarded" else "gradio's own check"
    with fault(
        "W3", f"paths, links and URLs in every component that takes a file, and one of each other kind: {layer}"
    ) as row:
        cases = list(attempts(page, made_for_it, foreign(page, secret, listener.url), listener.url, door))
        for fn, at, kind, name, value in cases:
            what, reply = f"{kind} of event {fn}: {name}", where.call(fn, data_of(page, fn, at, value))
            assert SECRET not in reply.text, what
            assert "root:x:" not in reply.text, what
            if door == "guarded":
                assert reply.status == 403, f"{what}: {reply}"
        assert not leaks(page, "")
        assert listener.knocked() == 0, "a URL was fetched"
        row.count = row.hits = len(cases)
        assert row.count >= 45
        row.note = "none read, copied or fetched"


def test_without_gradios_check_the_same_requests_would_give_the_file_away(page: Served, secret: Path) -> None:
    """What check_paths is for. Fails where a new gradio calls the switch otherwise, or has it on by itself."""
    assert page.page.has_launched is True
    fn, at, _ = file_inputs(page)[0]
    other = other_inputs(page)[0]
    value = {"path": str(secret), "orig_name": "a.yaml", **META}
    with fault("W3", "the same with gradio's check turned off: the fault is real") as row:
        page.page.has_launched = False
        try:
            told = page.bare.call(fn, data_of(page, fn, at, value))
            page.bare.call(*other[:1], data_of(page, *other[:2], value))
            found = leaks(page, told.text)
        finally:
            page.page.has_launched = True
            for path in [p for p in page.uploads.rglob("*") if p.is_file() and not p.is_symlink()]:
                path.unlink()
        assert "the reply" in found, told.text
        assert len(found) >= 2, found
        row.count = row.hits = 2
        row.note = "read and copied, as expected"


def test_a_recipe_that_was_uploaded_is_still_taken(page: Served) -> None:
    for door in (page.guarded, page.bare):
        path = json.loads(door.upload("mine.yaml", b"learning_rate: 0.00321\n").text)[0]
        for fn, at, _ in file_inputs(page)[:1]:
            reply = door.call(fn, data_of(page, fn, at, {"path": path, "orig_name": "mine.yaml", **META}))
            assert "0.00321" in reply.text, reply.text


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.html", b"<script>alert(1)</script>"),
        ("a.svg", b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>"),
        ("a.xhtml", b"<html xmlns='http://www.w3.org/1999/xhtml'><script>alert(1)</script></html>"),
        ("a.zip", b"PK"),
        ("no-suffix", b"<script>alert(1)</script>"),
        ("a.png", b"<script>alert(1)</script>"),
        ("a.txt", b"<script>alert(1)</script>"),
        ("../../../../a.html", b"<script>alert(1)</script>"),
    ],
)
def test_an_upload_that_is_fetched_again_is_never_a_page_of_this_site(page: Served, name: str, content: bytes) -> None:
    """Whatever gradio says of its kind, a browser runs no script of it: it is sandboxed, and not guessed at."""
    (path,) = json.loads(page.guarded.upload(name, content).text)
    assert Path(path).name == Path(name).name
    answer = page.guarded.ask("GET", f"/gradio_api/file={path}")
    told = {key.lower(): value for key, value in answer.headers.items()}
    assert answer.status == 200
    assert told["content-security-policy"].startswith("sandbox; default-src 'none'")
    assert told["x-content-type-options"] == "nosniff"
    assert "html" not in told["content-type"]
    assert "xml" not in told["content-type"]


def test_links_among_the_uploads_are_not_served(page: Served, secret: Path, listener: Listener) -> None:
    foreign(page, secret, listener.url)
    for name in ("link.yaml", "folder/link.yaml", "behind/secret.yaml"):
        reply = page.guarded.ask("GET", f"/gradio_api/file={page.uploads}/{name}")
        assert (reply.status, SECRET in reply.text) == (403, False)


def test_without_the_token_the_page_is_closed_to_other_accounts_of_this_machine(page: Served) -> None:
    stranger = Door(page.guarded.port)
    paths = ["/", "/config", "/theme.css", "/gradio_api/info", "/gradio_api/queue/data?session_hash=x",
             "/gradio_api/heartbeat/x", "/gradio_api/upload_progress?upload_id=x", "/gradio_api/startup-events",
             f"/?token={TOKEN[:-1]}", "/?token="]  # fmt: skip
    with fault("W2", "no token, or a wrong one, at a loopback address") as row:
        for method, path in [*(("GET", path) for path in paths), ("POST", JOIN), ("POST", UPLOAD)]:
            reply = stranger.ask(method, path, b"{}" if method == "POST" else None)
            assert reply.status == 403, f"{method} {path}: {reply.status}"
            assert TOKEN not in reply.text
            row.count += 1
        row.hits = row.count
        row.note = "403 each time"
