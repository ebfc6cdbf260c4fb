"""Reading config files one did not write: lines are kept, and nothing in them can run, hang or hide."""

from __future__ import annotations

import time

import pytest

from erniekit.config.files import read_file
from erniekit.errors import ConfigError
from support.clock import within


def write(tmp_path, text, name="r.yaml"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_each_key_knows_its_line(tmp_path):
    entries = read_file(write(tmp_path, "# a comment\nseed: 3\n\nmodel_args:\n  max_steps: 5\n"))
    assert entries["seed"].line == 2
    assert entries["model_args"].value["max_steps"].line == 5


def test_scalars_are_kept_as_written_next_to_their_yaml_value(tmp_path):
    entries = read_file(write(tmp_path, "doctor: off\nlearning_rate: 5e-7\nsplit: 1:30\neval_steps:\n"))
    assert entries["doctor"].given == "off"
    assert entries["learning_rate"].given == "5e-7"
    assert entries["split"].given == "1:30"  # YAML alone reads 90
    assert entries["eval_steps"].given is None


def test_json_keys_know_their_lines(tmp_path):
    entries = read_file(write(tmp_path, '{\n\t"seed": 3,\n\t"learning_rate": 1e-04\n}', "r.json"))
    assert (entries["seed"].given, entries["seed"].line) == (3, 2)
    assert entries["learning_rate"].given == 1e-4


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("seed: 1\ntrain_dataset_path my.jsonl\nmax_steps: 2\n", 2),
        ("seed: 1\nreport_to: [none, all\nmax_steps: 2\n", 2),
        ("seed: 1\nstage: 'SFT\nmax_steps: 2\n", 2),
        ("seed: 1\nmax_steps: 2\n\tbatch_size: 3\n", 3),
        ("seed: 1\nstage: a: b\n", 2),
        ('seed: 1\nreport_to: [\n  "a"\n  "b"\n]\n', 4),
    ],
)
def test_yaml_that_cannot_be_read_names_the_line_to_correct(tmp_path, text, line):
    with pytest.raises(ConfigError, match="not valid YAML") as e:
        read_file(write(tmp_path, text))
    assert e.value.where.endswith(f"r.yaml:{line}")


@pytest.mark.parametrize("name", ["r.yaml", "r.json"])
def test_a_key_given_twice_is_refused_with_both_lines(tmp_path, name):
    text = "seed: 1\nbatch_size: 2\nseed: 3\n" if name == "r.yaml" else '{"seed": 1,\n"batch_size": 2,\n"seed": 3}'
    with pytest.raises(ConfigError) as e:
        read_file(write(tmp_path, text, name))
    assert "r." in e.value.where
    assert ":1 and" in e.value.where
    assert e.value.where.endswith(":3")


@pytest.mark.parametrize(
    "payload",
    [
        "!!python/object/apply:os.system ['touch {canary}']",
        "!!python/object/new:subprocess.Popen [[touch, {canary}]]",
        "!!python/name:os.system ''",
        "!custom {{a: 1}}",
    ],
)
def test_a_tag_that_builds_objects_is_refused_and_runs_nothing(tmp_path, payload):
    canary = tmp_path / "canary"
    with pytest.raises(ConfigError) as e:
        read_file(write(tmp_path, "seed: 1\nmodel_config: " + payload.format(canary=canary) + "\n"))
    assert "tag" in e.value.what
    assert e.value.where.endswith(":2")
    assert not canary.exists()


def test_an_alias_bomb_is_refused_at_once(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    start = time.process_time()
    with pytest.raises(ConfigError, match="more than"):
        read_file(write(tmp_path, "\n".join(lines)))
    assert within(time.process_time() - start, 2)  # ten levels of ten would be 10 GB, minutes


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a: " + "[" * 3000 + "]" * 3000, "r.yaml"),
        ("a: " + "[" * 50_000, "r.yaml"),  # the C loader would recurse until the process dies
        ("- " * 50_000, "r.yaml"),
        ("a: &a [*a]", "r.yaml"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "r.json"),
        ("a: " + "x" * 1_000_001, "r.yaml"),
    ],
)
def test_files_too_deep_or_too_large_are_refused(tmp_path, text, name):
    with pytest.raises(ConfigError):
        read_file(write(tmp_path, text, name))


@pytest.mark.parametrize(
    ("text", "name", "line"),
    [
        ("seed: 1\n  bad: [\n", "r.yaml", 2),
        ("- a\n- b\n", "r.yaml", 1),
        ("base: &b {seed: 1}\n<<: *b\n", "r.yaml", 2),
        ('{"seed": 1,\n oops}', "r.json", 2),
    ],
)
def test_text_that_is_no_recipe_is_refused_with_its_line(tmp_path, text, name, line):
    with pytest.raises(ConfigError) as e:
        read_file(write(tmp_path, text, name))
    assert e.value.where.endswith(f":{line}")


def test_a_byte_order_mark_is_passed_over_and_other_encodings_are_named(tmp_path):
    assert read_file(write(tmp_path, b"\xef\xbb\xbfseed: 1\n"))["seed"].given == "1"
    with pytest.raises(ConfigError, match="UTF-8"):
        read_file(write(tmp_path, "seed: 1 # 中".encode("utf-16")))


def test_an_empty_file_is_a_recipe_without_keys(tmp_path):
    assert read_file(write(tmp_path, "# nothing yet\n")) == {}


def test_a_missing_file_suggests_its_neighbour(tmp_path):
    write(tmp_path, "seed: 1\n", "run_sft_8k.yaml")
    with pytest.raises(ConfigError) as e:
        read_file(str(tmp_path / "run_stf_8k.yaml"))
    assert "run_sft_8k.yaml" in e.value.fix
