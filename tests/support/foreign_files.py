"""A folder with somebody's files and links in it, for commands that must not change them."""

from __future__ import annotations

from pathlib import Path

from erniekit.checkpoint.writer import publish
from support.snapshot import changed, snapshot

# Names a run, an export or an index writes or deletes, planted as a user's files.
FILES = (
    "run.json", "metrics.jsonl", "report.html", "config.json", "model.safetensors", "other.safetensors",
    "model.safetensors.index.json", "tokenizer.model", "train_results.json", "all_results.json", "eval_results.json",
    "trainer_state.json", "bad_rows.jsonl", "bad_eval_rows.jsonl", "adapter_config.json", "adapter_model.safetensors",
    "notes.txt", ".hidden", "bench.json", "A1.json", "words.bin", "words.idx.json", "words_bad_rows.jsonl",
)  # fmt: skip
# The same as links into somebody's tree.
LINKS = (
    "checkpoint-2", "checkpoint-3", ".tmp-checkpoint-2-77-0123abcd", ".del-checkpoint-2-77-0123abcd",
    ".old-checkpoint-9-77-0123abcd", "export", "split_export", ".tmp-export-77-0123abcd", "words.indexing",
    ".new-model.safetensors", ".run.json.part", ".new-config.json", "data", "logs", "sft", "lora",
)  # fmt: skip


class Ground:
    """A folder with planted files, and a tree elsewhere that its links point into."""

    def __init__(self, root: Path) -> None:
        self.root, self.folder, self.elsewhere = root, root / "work", root / "elsewhere"
        self.planted: dict[str, str] = {}
        for name in ("model", "empty"):
            (self.elsewhere / name).mkdir(parents=True)
        weights = b"another run's weights"
        publish(self.elsewhere, "checkpoint-2", lambda tmp: (tmp / "model.safetensors").write_bytes(weights) and None)
        (self.elsewhere / "model" / "config.json").write_text('{"mine": true}')
        self.folder.mkdir()

    def plant(self, *names: str) -> None:
        for name in names:
            path = self.folder / name
            if path.exists() or path.is_symlink():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            if name in LINKS:
                path.symlink_to(self.elsewhere / "checkpoint-2")
            else:
                path.write_bytes(f"somebody's {name}".encode())
        (self.folder / "locked").mkdir(exist_ok=True)
        (self.folder / "locked" / "file").write_text("mine")
        (self.folder / "locked").chmod(0o500)

    def remember(self, *ours: str) -> None:
        """All that is here now but what an earlier command of ours wrote."""
        self.planted = {n: s for n, s in snapshot(self.root).items() if n not in ours}

    def check(self, links_may_go: bool = False) -> None:
        gone = changed(self.planted, snapshot(self.root))
        if links_may_go:  # a link in the place of a checkpoint of ours is unlinked by rotation; its target stays
            gone = [name for name in gone if not self.planted[name].startswith("link")]
        assert gone == []
