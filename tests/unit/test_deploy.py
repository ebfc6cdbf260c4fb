"""The examples of deploy/: images copy what exists and start what is installed, cluster files are read as such, and
every erniekit command in them resolves."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml

from erniekit.cli.commands import COMMANDS
from erniekit.config import load

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted(DEPLOY.glob("Dockerfile.*"))
INSTRUCTIONS = {"FROM", "ARG", "ENV", "WORKDIR", "COPY", "RUN", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions(path: Path) -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#")))
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


def resolves(words: list[str]) -> None:
    """As after `erniekit`. What only a cluster has is not looked for: files of its volumes, numbers of its nodes."""
    assert words[0] in COMMANDS
    known = [re.sub(r"\$\(?\w+\)?", "0", word) for word in words[1:]]
    recipes = [word for word in known if word.endswith(".yaml") and (ROOT / word).is_file()]
    load([str(ROOT / word) if word in recipes else word for word in known if word != "recipe.yaml"], words[0])


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_copies_what_exists_and_starts_our_command(path: Path):
    found = instructions(path)
    assert {name for name, _ in found} <= INSTRUCTIONS
    assert found[0][0] == "FROM"
    copied = [word for name, rest in found if name == "COPY" for word in rest.split()[:-1]]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(copied) <= kept, "the build context leaves out everything else"
    assert {"pyproject.toml", "setup.py", "src", "examples"} <= set(copied)  # what a build of the package reads
    (entry,) = (json.loads(rest) for name, rest in found if name == "ENTRYPOINT")
    assert entry[0] in PROJECT["scripts"]
    (default,) = (json.loads(rest) for name, rest in found if name == "CMD")
    assert default[0] in COMMANDS
    for name, rest in found:
        if name == "RUN":
            assert subprocess.run(["bash", "-n", "-c", rest], capture_output=True).returncode == 0, rest
            extras = re.findall(r'"\.\[([\w,]+)\]"', rest)
            assert {e for group in extras for e in group.split(",")} <= set(PROJECT["optional-dependencies"])
    names = [name for name, _ in found]
    users = [rest for name, rest in found if name == "USER"]
    assert users == ["1000"], "a number: Kubernetes cannot tell whether a name is root"
    assert "-o 1000 -g 1000 /work" in path.read_text(), "WORKDIR makes folders of root"
    assert "RUN" not in names[names.index("USER") :], "what needs root comes before"
    pips = [rest for name, rest in found if name == "RUN" and "pip install" in rest]
    assert pips == ['pip install -c constraints.txt ".[serve,structured]" && rm -rf /src']
    python = [tuple(map(int, m)) for m in re.findall(r"python:(\d+)\.(\d+)", found[0][1])]
    assert all(version >= (3, 10) for version in python)


class Health(BaseHTTPRequestHandler):
    """Answers /health with the status that its server has."""

    def do_GET(self) -> None:
        self.send_response(self.server.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def healthy(folder: Path, *words: str) -> bool:
    (folder / "cmdline").write_bytes("\0".join(["python", "/usr/bin/erniekit", *words]).encode() + b"\0")
    called = [sys.executable, str(DEPLOY / "healthcheck.py"), str(folder / "cmdline")]
    return subprocess.run(called, capture_output=True).returncode == 0


def test_the_health_check_asks_a_server_at_its_port_and_nothing_else(tmp_path: Path):
    for path in DOCKERFILES:
        (check,) = (rest for name, rest in instructions(path) if name == "HEALTHCHECK")
        assert json.loads(check[check.index("CMD ") + 4 :]) == ["python3", "/opt/healthcheck.py"]
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        port = server.server_port
        for status, expected in ((200, True), (503, False)):
            server.status = status  # type: ignore[attr-defined]
            assert healthy(tmp_path, "server", "m", f"port={port}") is expected
            assert healthy(tmp_path, "server", "m", "--port", str(port)) is expected
            assert healthy(tmp_path, "train", "recipe.yaml"), "not a server"
        server.shutdown()
    assert not healthy(tmp_path, "server", "m", f"port={port}"), "nothing listens"


def test_two_images_are_described():
    assert [path.name for path in DOCKERFILES] == ["Dockerfile.cpu", "Dockerfile.cuda13"]


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def pods(name: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for document in documents(name):
        if document["kind"] in ("Job", "Deployment"):
            yield document, document["spec"]["template"]["spec"]


@pytest.mark.parametrize("name", ["train-kubernetes.yaml", "server-kubernetes.yaml"])
def test_kubernetes_objects_are_whole_and_their_commands_resolve(name: str):
    versions = {"Service": "v1", "Job": "batch/v1", "Deployment": "apps/v1"}
    for document in documents(name):
        assert document["apiVersion"] == versions[document["kind"]]
        assert document["metadata"]["name"]
    for _, pod in pods(name):
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes
            assert container["image"] == "erniekit:cuda13"
            assert all("value" in item or "valueFrom" in item for item in container.get("env", ()))
            assert all(isinstance(item.get("value", ""), str) for item in container.get("env", ()))
            resolves(container["args"])


def test_the_kubernetes_run_meets_where_its_service_says():
    service, _ = documents("train-kubernetes.yaml")
    ((job, pod),) = pods("train-kubernetes.yaml")
    env = {item["name"]: item.get("value") for item in pod["containers"][0]["env"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert env["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert int(env["NNODES"]) == job["spec"]["completions"] == job["spec"]["parallelism"]


def test_the_kubernetes_server_is_reached_by_its_service():
    deployment, service = documents("server-kubernetes.yaml")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels == service["spec"]["selector"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    port = container["ports"][0]["containerPort"]
    assert service["spec"]["ports"][0]["targetPort"] == port
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": port}
    drain = load(container["args"][1:], "server").serve.drain_timeout
    grace = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > drain + 6, "or running answers are cut off"
    assert f"port={port}" in container["args"]


def test_the_skypilot_task_has_its_fields_and_its_scripts_parse():
    (task,) = documents("train-skypilot.yaml")
    assert set(task) == {"name", "num_nodes", "resources", "workdir", "setup", "run"}
    for part in ("setup", "run"):
        assert subprocess.run(["bash", "-n", "-c", task[part]], capture_output=True).returncode == 0
    (line,) = (line for line in task["run"].splitlines() if "bin/erniekit" in line)
    resolves(shlex.split(line)[1:])


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (75, True), (1, False)])
def test_the_slurm_script_starts_each_node_and_requeues_what_was_preempted(code: int, requeued: bool, tmp_path: Path):
    """Slurm's two programs are stand-ins that write down how they were called; the script is the real one."""
    programs = {
        "scontrol": 'if [ "$1" = show ]; then echo node7; echo node8; else echo "$@" >> "$CALLS"; fi',
        "srun": 'shift; SLURM_NODEID=1 "$@"',
        "erniekit": 'echo "$@" "at $MASTER_ADDR:$MASTER_PORT of $NNODES" >> "$CALLS"; exit $CODE',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": "2"}
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, **job, "PATH": path, "CALLS": str(tmp_path / "calls"), "CODE": str(code)}
    words = ["bash", str(DEPLOY / "train.slurm"), "my recipe.yaml", "max_steps=3"]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    first, *rest = (tmp_path / "calls").read_text().splitlines()
    assert first == "train my recipe.yaml max_steps=3 --node_rank 1 at node7:24711 of 2"
    assert rest == (["requeue 4711"] if requeued else [])
    assert subprocess.run([words[0], words[1]], env=env, capture_output=True).returncode == 2
