"""Who may import whom: arrows run one way, help stays light, and no file outgrows its reader."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("architecture")  # one worker parses the package

SRC = Path(__file__).resolve().parents[2] / "src" / "erniekit"
# A room is a folder or a file directly in the package; "erniekit" is the package's own __init__.py.
# room -> the rooms it may import; OPEN is open to all rooms that are not in it, and so is a room's own inside.
ALLOWED = {
    "capabilities": set(),
    "early_imports": set(),
    "errors": {"printable"},
    "extras": set(),
    "first_interrupt": set(),
    "heartbeat": set(),
    "host_memory": set(),
    "intervals": set(),
    "log": {"printable"},
    "printable": set(),
    "process_stat": set(),
    "progress": set(),
    "version": set(),
    "registry": {"errors", "log"},
    "flag_parser": {"errors", "registry"},
    "weight_kinds": {"registry"},
    "quant_schemes": set(),
    "lora_scale": set(),
    "loss_table": {"registry"},
    "model_contract": set(),
    "files": {"errors", "log"},
    "result": set(),
    "config": {"devices"},  # the table of words in its __init__, which imports no torch; so do cli, launch and webui
    "net": {"config"},
    "kernels": set(),
    "devices": set(),
    "parallel": {"devices", "kernels"},
    "models": {"kernels", "parallel"},
    "planner": {"models", "parallel", "kernels"},
    "rehearse": {"parallel", "devices"},
    "data": set(),
    "losses": {"data", "kernels"},
    "optim": {"kernels", "devices"},
    "lora": {"models", "kernels", "checkpoint"},
    "checkpoint": {"models", "parallel", "devices", "data", "kernels"},
    "track": set(),
    "train": {"losses", "optim", "data", "checkpoint", "parallel", "track", "devices", "models"},
    "export": {"checkpoint", "models", "lora", "data", "config", "kernels", "result"},
    "quantize": {"checkpoint", "models", "kernels", "data", "export", "track"},
    "api_load": {"checkpoint", "data", "export", "lora"},
    "serve": {
        "checkpoint", "devices", "models", "lora", "data", "config", "export", "api_load", "net", "kernels",
    },
    "recipes": {
        "train", "losses", "optim", "data", "checkpoint", "parallel", "track", "devices", "models", "lora", "config",
        "export", "quantize", "serve", "demo", "api_load", "kernels", "result", "planner", "rehearse",
    },
    "demo": {"models", "checkpoint", "data", "lora", "track"},
    "webui": {"config", "devices", "net", "track"},
    "bench": {
        "kernels", "recipes", "planner", "config", "data", "demo", "models", "checkpoint", "devices", "parallel",
        "train",
    },
    "launch": {"config", "devices"},
    "cli": {"config", "recipes", "export", "serve", "data", "devices", "launch", "first_interrupt"},
    "api": {
        "api_load", "recipes", "serve", "data", "devices", "models", "losses", "config", "track", "train", "result",
    },
    "erniekit": {"api", "first_interrupt"},
    "__main__": {"cli"},
}  # fmt: skip
OPEN = {
    "capabilities", "early_imports", "errors", "extras", "files", "flag_parser", "heartbeat", "host_memory",
    "intervals", "log", "lora_scale", "loss_table", "model_contract", "printable", "process_stat", "progress",
    "quant_schemes", "registry", "version", "weight_kinds",
}  # fmt: skip


def modules() -> dict[str, Path]:
    """Dotted name without "erniekit.", and the file; a package is its __init__.py, "erniekit" the outermost."""
    named = {".".join(p.relative_to(SRC).with_suffix("").parts): p for p in SRC.rglob("*.py")}
    return {name.removesuffix("__init__").removesuffix(".") or "erniekit": p for name, p in named.items()}


MODULES = modules()


def statements(tree: ast.AST, types: bool) -> Iterator[ast.AST]:
    """All of them, also inside functions; types: also those that only a type checker reads."""
    todo = [tree]
    while todo:
        node = todo.pop()
        yield node
        below = list(ast.iter_child_nodes(node))
        if not types and isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            below = list(node.orelse)
        todo += [child for child in below if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case)]


@cache
def parsed(file: Path) -> ast.Module:
    text = file.read_text(encoding="utf-8")
    try:
        return ast.parse(text)
    except SystemError:  # Python 3.11 counts the depth of all threads together (CPython issue 106905)
        return ast.parse(text)


@cache
def imports(file: Path) -> set[str]:
    """The modules of erniekit that a file imports, wherever in the file, also those for a type checker alone."""
    return named_in(statements(parsed(file), types=True), file)


def named_in(nodes: Iterable[ast.AST], file: Path) -> set[str]:
    """The modules of erniekit that these statements import."""
    found = set()
    for node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"{file}: modules are named in full"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name.removeprefix("erniekit.") in MODULES else node.module for name in whole]
        found |= {n.removeprefix("erniekit.") for n in names if n == "erniekit" or n.startswith("erniekit.")}
    return found


def room(module: str) -> str:
    return module.split(".")[0]


def floors() -> dict[str, int]:
    """A room's height above those it may import. A map that turns back has none."""
    below = {name: allowed if name in OPEN else allowed | OPEN for name, allowed in ALLOWED.items()}
    heights: dict[str, int] = {}
    for name in TopologicalSorter(below).static_order():
        heights[name] = 1 + max((heights[other] for other in below[name]), default=-1)
    return heights


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Groups of modules each of which leads to all others of its group."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            for name in graph[todo.pop()] - seen:
                seen.add(name)
                todo.append(name)
        return seen

    reach = {name: reached(name) for name in graph}
    return {frozenset(o for o in reach[name] if name in reach[o]) for name in graph if name in reach[name]}


def test_arrows_between_rooms_never_turn_back() -> None:
    wrong = []
    for module, file in MODULES.items():
        own = room(module)
        allowed = ALLOWED[own] | {own} | (set() if own in OPEN else OPEN)
        wrong += [f"{module} imports {name}" for name in sorted(imports(file)) if room(name) not in allowed]
    assert not wrong, "\n".join(wrong)


def test_no_arrow_leads_from_a_lower_floor_up() -> None:
    height, wrong = floors(), []
    for module, file in MODULES.items():
        own = room(module)
        for name in sorted(imports(file)):
            if room(name) != own and height[room(name)] >= height[own]:
                wrong.append(f"{module} (floor {height[own]}) imports {name} (floor {height[room(name)]})")
    assert not wrong, "\n".join(wrong)


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = {module: imports(file) & set(MODULES) - {module} for module, file in MODULES.items()}
    assert not circles(graph)


def test_a_circle_over_several_files_is_found_and_what_leads_into_it_is_no_part_of_it() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"d", "e"}, "d": {"b"}, "e": set()}
    assert circles(graph) == {frozenset({"b", "c", "d"})}


def test_every_room_is_on_the_map() -> None:
    assert {room(module) for module in MODULES} == set(ALLOWED)


def test_the_page_on_the_architecture_lists_what_is_open_to_all() -> None:
    page = (SRC.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    listed = re.search(r"only what is open to all: ([\w\s,]+)\nconfig,", page)
    assert listed
    assert set(listed[1].replace(",", " ").split()) == OPEN


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    long = {str(p.relative_to(SRC)): n for p in SRC.rglob("*.py") if (n := len(p.read_text().splitlines())) > 400}
    assert not long


def test_importing_erniekit_and_its_config_imports_no_torch() -> None:
    modules = "'torch' in sys.modules, 'numpy' in sys.modules"
    code = f"import sys, erniekit, erniekit.config, erniekit.cli.main; print({modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def imported_with(module: str) -> set[str]:
    """What comes with a module when it is imported: not what its functions import when they run."""
    seen: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        seen.add(name)
        todo += outside_functions(MODULES[name]) - seen
    return seen


@cache
def outside_functions(file: Path) -> set[str]:
    functions = [n for n in ast.walk(parsed(file)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    inner = {id(node) for one in functions for node in ast.walk(one)}
    here = [n for n in statements(parsed(file), types=False) if id(n) not in inner]
    return named_in([n for n in here if isinstance(n, ast.Import | ast.ImportFrom)], file)


def test_a_plan_imports_what_shapes_need_and_not_how_models_are_read_spread_or_fed() -> None:
    """A fifth of its seconds would go there."""
    found = imported_with("recipes.planning")
    assert "models.config" in found
    assert "planner.job" in found
    assert not {name for name in found if room(name) in ("data", "checkpoint", "train") or name == "parallel.apply"}


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
    silent = [str(p.relative_to(SRC)) for p in MODULES.values() if parsed(p).body and not ast.get_docstring(parsed(p))]
    assert not silent


def test_no_public_class_name_is_defined_twice() -> None:
    found: dict[str, list[str]] = {}
    for file in SRC.rglob("*.py"):
        for node in statements(parsed(file), types=True):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(str(file.relative_to(SRC)))
    twice = {name: files for name, files in found.items() if len(files) > 1}
    assert not twice


def callers_named(text: str) -> list[str]:
    """The files that a docstring says it is called, used or made by, what stands in brackets left out."""
    plain = re.sub(r"\([^()]*\)", "", " ".join(text.split()))
    found = re.findall(r"(?:(?:Called|Used|Made|Built|Held|Opened|Filled) by|Registered in) ((?:[^.;]|\.py)*)", plain)
    return [name for line in found for name in re.findall(r"[\w/]+\.py", line)]


def test_the_files_that_a_module_names_as_its_callers_import_it() -> None:
    wrong = []
    for module, file in MODULES.items():
        for name in callers_named(ast.get_docstring(parsed(file)) or ""):
            named = [p for p in MODULES.values() if p.as_posix().endswith(f"/{name}")] or [SRC.parents[1] / name]
            if not any(_imports(caller, module) for caller in named):
                wrong.append(f"{module} is not imported by {name}")
    assert not wrong, "\n".join(wrong)


def _imports(file: Path, module: str) -> bool:
    """By a statement, or in a table of names."""
    if not file.is_file():
        return False
    inside = any(name == module or name.startswith(f"{module}.") for name in imports(file))
    return inside or f'"erniekit.{module}:' in file.read_text(encoding="utf-8")


def test_callers_are_found_in_whole_sentences() -> None:
    text = "A. Called by a.py and\nb/c.py (d.py), when asked; e.py too. Used by f.py. Made by g.py. Registered in h.py."
    assert callers_named(text) == ["a.py", "b/c.py", "f.py", "g.py", "h.py"]


def methods_replaced(code: str) -> list[int]:
    """Lines that assign an object's `forward`, `attend` or `run_layers`."""
    names, found = {"forward", "attend", "run_layers"}, []
    if not any(f".{name} = " in code or f'"{name}"' in code for name in names):
        return []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Assign):
            replaced = any(isinstance(target, ast.Attribute) and target.attr in names for target in node.targets)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            replaced = isinstance(node.args[1], ast.Constant) and node.args[1].value in names
        else:
            continue
        found += [node.lineno] if replaced else []
    return sorted(found)


def test_methods_of_a_model_are_replaced_in_one_place() -> None:
    found = {p.relative_to(SRC).as_posix(): methods_replaced(p.read_text(encoding="utf-8")) for p in MODULES.values()}
    assert not {place: lines for place, lines in found.items() if lines}, "use erniekit.model_contract.wrap"
    assert methods_replaced('layer.forward = f\nsetattr(x, "attend", g)\nself.run_layers = h\nx.other = f') == [1, 2, 3]


# What getattr and hasattr may ask in rooms that use models: of torch, Python and plug-ins. Of a model's modules
# model_contract.py asks.
ASKED = {
    "_dump_fr_trace_json", "_post_accumulate_grad_hooks", "full_tensor", "rehearsed", "reshard", "to_local", "uncast",
    "SIGRTMIN", "memfd_create", "sched_getaffinity", "__qualname__", "__self__",
    "close", "EVIDENCE", "PLUGIN", "WHEN_ABSENT",
}  # fmt: skip


def asked_by_name(tree: ast.Module) -> set[str]:
    """Names that getattr and hasattr are given as they are."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) > 1)
    asking = (call for call in calls if ast.unparse(call.func) in ("getattr", "hasattr"))
    return {str(call.args[1].value) for call in asking if isinstance(call.args[1], ast.Constant)}


def test_what_a_module_of_a_model_may_have_is_asked_through_the_contract() -> None:
    rooms = {"parallel", "lora", "train", "recipes", "losses", "optim"}
    found = {name: asked_by_name(parsed(file)) for name, file in MODULES.items() if room(name) in rooms}
    assert not {name: names - ASKED for name, names in found.items() if names - ASKED}, "see erniekit.model_contract"
    assert set().union(*found.values()) == ASKED, "what nobody asks any more is not listed"
    assert asked_by_name(ast.parse('getattr(m, "tower", 1) or hasattr(m, "x") or getattr(m, name)')) == {"tower", "x"}


def test_every_public_function_and_class_is_used_outside_of_tests() -> None:
    """Its name occurs again in its own file, in a table (`module:name`), or in a file of the package or of benchmarks/
    that imports its module or, as modules are loaded by name too, the package that this is in. A kernel's `reference`
    is its definition, which tests compare with."""
    files = [*MODULES.values(), *(SRC.parents[1] / "benchmarks").rglob("*.py")]
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    words = {file: Counter(re.findall(r"\w+", text)) for file, text in texts.items()}
    in_tables = {name for text in texts.values() for name in re.findall(r":(\w+)\"", text)}
    users: dict[str, set[Path]] = {}
    for file in files:
        for module in imports(file):
            users.setdefault(module, set()).add(file)
    defined = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    unused = []
    for module, file in MODULES.items():
        others = users.get(module, set()) | users.get(module.rpartition(".")[0], set())
        for node in parsed(file).body:
            if not isinstance(node, defined) or node.name.startswith("_") or words[file][node.name] > 1:
                continue
            if node.name in in_tables or (node.name == "reference" and room(module) == "kernels"):
                continue
            if not any(node.name in words[other] for other in others):
                unused.append(f"{module}: {node.name}")
    assert not unused, "\n".join(unused)
