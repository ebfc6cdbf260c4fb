"""Another distribution called `erniekit` beside ours: said at the start, and refused where it has replaced our files.

The processes run without site-packages (-S), so that they see the packages made here and no others.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from erniekit.extras import PROJECT, install_command

OTHER = "erniekit = erniekit.cli:main"
OURS = "erniekit = erniekit.cli.main:main"


def install(site: Path, name: str, version: str, script: str, files: list[str], url: str = "") -> Path:
    """The metadata pip leaves of a distribution whose files are already in `site`."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "entry_points.txt").write_text(f"[console_scripts]\n{script}\n")
    digests = {f: base64.urlsafe_b64encode(hashlib.sha256((site / f).read_bytes()).digest()) for f in files}
    record = [f"{f},sha256={digest.decode().rstrip('=')}," for f, digest in digests.items()]
    record.append(f"{folder.name}/RECORD,,")
    (folder / "RECORD").write_text("\n".join(record) + "\n")
    if url:
        (folder / "direct_url.json").write_text(f'{{"url": "{url}", "dir_info": {{"editable": true}}}}')
    return folder


def start(site: Path, *words: str, script: str = "erniekit.cli.main") -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.argv[1:] = {list(words)!r}; from {script} import main; sys.exit(main())"
    env = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run([sys.executable, "-S", "-c", code], env=env, capture_output=True, text=True, timeout=60)


@pytest.fixture
def site(tmp_path: Path, root: Path) -> Path:
    """Ours as a wheel leaves it: the package and its metadata."""
    site = tmp_path / "site"
    shutil.copytree(root / "src" / "erniekit", site / "erniekit", ignore=shutil.ignore_patterns("__pycache__"))
    files = [str(p.relative_to(site)) for p in (site / "erniekit").rglob("*.py")]
    install(site, PROJECT, "0.1.0", OURS, files)
    return site


def test_ours_alone_starts_without_a_word(site):
    done = start(site, "version")
    assert (done.returncode, done.stderr) == (0, "")


def test_another_package_of_our_import_name_is_named_in_three_lines(site):
    install(site, "erniekit", "1.3.0", OTHER, [])
    done = start(site, "version")
    what, where, fix = done.stderr.splitlines()
    assert done.returncode == 0
    assert "another project's" in what
    assert where.endswith("erniekit-1.3.0.dist-info")
    assert fix == f"fix:   pip uninstall erniekit; pip install --force-reinstall --no-deps {PROJECT}"


def test_another_package_with_an_unreadable_list_of_files_is_still_only_named(site):
    (install(site, "erniekit", "1.3.0", OTHER, []) / "RECORD").write_text("\n,\n")
    done = start(site, "version")
    assert done.returncode == 0
    assert "another project's" in done.stderr


@pytest.mark.parametrize("script", ["erniekit.cli.main", "erniekit.cli"])
def test_a_package_that_has_replaced_our_files_is_refused(site, script):
    """Its own console script as well: it calls `erniekit.cli:main`, where our package has a module."""
    (site / "erniekit" / "__init__.py").write_text('__version__ = "1.3.0"\n')
    install(site, "erniekit", "1.3.0", OTHER, ["erniekit/__init__.py"])
    done = start(site, "version", script=script)
    assert done.returncode == 2, done.stderr
    what, where, fix = done.stderr.splitlines()
    assert "has replaced 1 of our files: erniekit/__init__.py" in what
    assert where.startswith("where: ")
    assert "pip uninstall erniekit" in fix


def test_our_own_earlier_install_is_told_apart_and_reinstalled_from_where_it_came(tmp_path, root):
    site = tmp_path / "site"
    install(site, "erniekit", "0.1.0", OURS, [], url="file:///home/me/checkout")
    (site / "erniekit").symlink_to(root / "src" / "erniekit")
    done = start(site, "version")
    what, _, fix = done.stderr.splitlines()
    assert done.returncode == 0
    assert "its earlier name" in what
    assert "another project" not in what
    assert fix.endswith("pip install --force-reinstall --no-deps -e /home/me/checkout")


def test_every_printed_install_command_names_our_project_and_an_extra_it_has(root):
    project = (root / "pyproject.toml").read_text()
    extras = set(re.findall(r"^(\w+) = \[", project.partition("[project.optional-dependencies]")[2], re.M))
    assert f'\nname = "{PROJECT}"\n' in project
    assert {"serve", "webui", "dev"} <= extras
    texts = [root / "README.md", *(root / "docs").rglob("*.md"), *(root / "src").rglob("*.py"), root / "pyproject.toml"]
    wrong = []
    for file in texts:
        text = file.read_text(encoding="utf-8")
        wrong += [f"{file}: {m}" for m in re.findall(r"(?<![\w-])erniekit\[[\w, ]+\]", text)]
        named = [e for m in re.findall(rf"{PROJECT}\[([\w,]+)\]", text) for e in m.split(",")]
        named += re.findall(r"install_command\([\"'](\w+)[\"']\)", text)
        wrong += [f"{file}: no extra {e}" for e in named if e not in extras]
    assert not wrong
    assert install_command("webui") == 'pip install "erniekit-torch[webui]"'
