"""Who may import whom: arrows run one way, help stays light, and no file outgrows its reader."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

SRC = Path(__file__).resolve().parents[2] / "src" / "erniekit"
# room -> the rooms it may import; OPEN is open to all, and so is a room's own inside.
ALLOWED = {
    "config": set(),
    "files": set(),
    "net": {"config"},
    "kernels": set(),
    "devices": set(),
    "parallel": {"devices", "kernels"},
    "models": {"kernels", "parallel"},
    "data": set(),
    "losses": {"data", "kernels"},
    "optim": {"kernels"},
    "lora": {"models", "kernels", "checkpoint"},
    "checkpoint": {"models", "parallel", "devices", "data"},
    "track": set(),
    "train": {"losses", "optim", "data", "checkpoint", "parallel", "track", "devices", "models"},
    "export": {"checkpoint", "models", "lora", "data", "config", "result"},
    "serve": {"checkpoint", "devices", "models", "lora", "data", "config", "export", "api_load", "net"},
    "recipes": {
        "train", "losses", "optim", "data", "checkpoint", "parallel", "track", "devices", "models", "lora", "config",
        "export", "serve", "demo", "api_load", "kernels", "result",
    },
    "demo": {"models", "checkpoint", "data", "lora", "track"},
    "webui": {"config", "net", "track"},
    "bench": {"recipes", "config", "data", "models", "checkpoint", "devices", "parallel", "train"},
    "cli": {"config", "recipes", "export", "serve", "data"},
}  # fmt: skip
OPEN = {"errors", "extras", "files", "heartbeat", "log", "lora_scale", "loss_table", "registry", "__version__"}


def imports(file: Path) -> set[str]:
    """Rooms of erniekit that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{a.name}" for a in node.names if node.module == "erniekit")]
        found |= {name.split(".")[1] for name in names if name.startswith("erniekit.")}
    return found


def test_arrows_between_rooms_never_turn_back() -> None:
    wrong = []
    for room, allowed in ALLOWED.items():
        for file in (SRC / room).rglob("*.py"):
            extra = imports(file) - allowed - OPEN - {room}
            wrong += [f"{file.relative_to(SRC)} imports {name}" for name in sorted(extra)]
    assert not wrong, "\n".join(wrong)


def test_every_room_is_on_the_map() -> None:
    rooms = {p.name for p in SRC.iterdir() if p.is_dir() and not p.name.startswith("__")}
    assert rooms == set(ALLOWED)


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    long = {str(p.relative_to(SRC)): n for p in SRC.rglob("*.py") if (n := len(p.read_text().splitlines())) > 400}
    assert not long


def test_importing_erniekit_and_its_config_imports_no_torch() -> None:
    modules = "'torch' in sys.modules, 'numpy' in sys.modules"
    code = f"import sys, erniekit, erniekit.config, erniekit.cli.main; print({modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_training_imports_neither_transformers_nor_without_a_card_torchs_compiler() -> None:
    heavy = ["transformers", "torch._dynamo", "torch._inductor", "sympy"]
    code = (
        f"import sys, torch, erniekit.recipes.training, erniekit.recipes.sft, erniekit.recipes.doctor\n"
        f"print(torch.cuda.is_available(), *(name for name in {heavy} if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    card, *found = done.stdout.split()
    assert "transformers" not in found
    assert card == "True" or not found, "these cost every start several seconds"


def test_no_module_opens_without_saying_what_it_is_for() -> None:
    silent = [
        str(p.relative_to(SRC))
        for p in SRC.rglob("*.py")
        if p.read_text().strip() and not ast.get_docstring(ast.parse(p.read_text()))
    ]
    assert not silent
