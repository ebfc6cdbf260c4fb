"""Reading a shell script without running it: variables, quotes, continued lines, and what only a shell can know."""

from __future__ import annotations

import os
import subprocess
import time

import pytest

from erniekit.config.migrate.shell import read_script
from erniekit.errors import ConfigError
from support.clock import within


def words(text: str) -> list[list[str]]:
    return [[w.text for w in s.words] for s in read_script(text, "run.sh") if s.words]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b  c # d", ["a", "b", "c"]),
        ("a \\\n  b\\\n  --c 1", ["a", "b", "--c", "1"]),
        ("a 'b c' \"d e\"", ["a", "b c", "d e"]),
        ('a "" b', ["a", "", "b"]),
        ("x=1\na $x ${x}2 '$x' \"$x\"", ["a", "1", "12", "$x", "1"]),
        ('x="--b 1 --c"\na $x', ["a", "--b", "1", "--c"]),
        ('x="b 1"\na "$x"', ["a", "b 1"]),
        ("x=\na $x b", ["a", "b"]),
        ("a ${y:-8} ${y}", ["a", "8", "${y}"]),
        ("a\\ b c", ["a b", "c"]),
        ("a b 2>&1 > log.txt c", ["a", "b", "c"]),
        ("a &> log.txt", ["a"]),
        ("a#b", ["a#b"]),
        ("export A=1 B='2 3'\na $A $B", ["a", "1", "2", "3"]),
        ('x="${y:-b  c}"\na "$x"', ["a", "b  c"]),
    ],
)
def test_words_are_what_the_shell_would_pass(text, expected):
    assert words(text)[-1] == expected


def test_commands_end_where_the_shell_ends_them():
    assert words("a; b && c || d | tee e\n(f) & g") == [["a"], ["b"], ["c"], ["d"], ["tee", "e"], ["f"], ["g"]]
    assert [s.piped for s in read_script("d 2>&1 | tee e\nf", "run.sh")] == [False, True, False]


def test_a_text_that_is_handed_to_a_command_is_none_of_the_script():
    text = "cat > x <<'END'\nerniekit train a.yaml\nEND\ncat <<-EOF | b\n  c\n  EOF\nd <<< e\nf"
    assert words(text) == [["cat"], ["cat"], ["b"], ["d"], ["f"]]
    assert read_script(text, "run.sh")[-1].line == 8


def test_words_know_their_line_and_assignments_their_command():
    (statement,) = read_script("# one\nA=1 B=2 run \\\n  --x \\\n  3\n", "run.sh")
    assert [(w.text, w.line) for w in statement.words] == [("run", 2), ("--x", 3), ("3", 4)]
    assert [(name, word.text) for name, word in statement.assigned] == [("A", "1"), ("B", "2")]


@pytest.mark.parametrize("text", ["$1", "${HOME}/x", "$(date)", "`date`", "$(echo $(a (b)))", "a$@", '"$(ip a | x)"'])
def test_what_only_the_shell_knows_stays_as_written_and_is_marked(text):
    (statement,) = read_script(f"run {text}", "run.sh")
    (word,) = statement.words[1:]
    assert word.open
    assert word.text == text.strip('"')


def test_a_value_made_of_an_open_one_is_open():
    statements = read_script('m=$1\nrun "${m}:8080"', "run.sh")
    assert statements[-1].words[1].open


def test_nothing_of_a_script_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    read_script("touch made; x=$(touch made)\n`touch made`\nrun $x", "run.sh")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("text", "line"), [("a\n'b", 2), ('a "b', 1), ("a $(b", 1), ("a\n\n${b", 3)])
def test_what_is_never_closed_is_refused_with_its_line(text, line):
    with pytest.raises(ConfigError) as e:
        read_script(text, "run.sh")
    assert e.value.where == f"run.sh:{line}"


def test_a_variable_that_doubles_itself_is_stopped_soon():
    began = time.process_time()
    with pytest.raises(ConfigError, match="longer than"):
        read_script("x=aaaaaaaa\n" + "x=$x$x\n" * 60, "run.sh")
    assert within(time.process_time() - began, 5)


def bash(script):
    characters = {**os.environ, "LC_ALL": "C.UTF-8"}
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, env=characters).stdout


@pytest.mark.parametrize("value", ["$x", "pre$x", "${x%c}", "'$x'", '"$x"', "$x\\ $x", "${u:-$x}"])
@pytest.mark.parametrize(
    "line",
    ["export z=VALUE", "export o=1 z=VALUE", "declare z=VALUE", "readonly z=VALUE o=1", "o=1 z=VALUE",
     "if true; then export z=VALUE; fi", "export z=VALUE && o=$z"],
)  # fmt: skip
def test_a_value_is_not_cut_at_blanks_wherever_it_is_assigned(line, value):
    script = f"x='a  b c'\n{line.replace('VALUE', value)}\n"
    (*_, run) = read_script(script + 'run "$z"', "run.sh")
    assert [word.text for word in run.words[1:]] == [bash(script + 'printf %s "$z"')]


def test_a_word_like_an_assignment_behind_a_command_is_cut_at_blanks():
    assert words("x='a b'\nrun z=$x")[-1][1:] == ["z=a", "b"]


EXPANSIONS = [
    "##*/", "#*/", "%/*", "%%.*", "%.*", "#a", "%'.gz'", '%".gz"', "%$y", '%"$y"', "##*[", "%[.]*",
    ":-d", ":-$y/log", "-d", ":+alt", "+alt", ":=new", ":-${y}", ":-${y##*/}", "^^", ",,", "^", ":2", ":1:3", ":9:1",
    "/b/X", "//b/X", "//b/", "/#a/X", "/%z/X", "//[a-b]/_", "//[!a-c]/-", "/?/Q", "//'*'/W", "//\\*/W", "//*/W",
    "/b/'z'", "/#/pre", "/%/post", "//a*b/Q", "//./", "//\\//_", "//a/$y",
    "///", "////_", "///m/_", "/\\}/c", "//\\{/c",
]  # fmt: skip


@pytest.mark.parametrize("quote", ["", '"'])
@pytest.mark.parametrize("value", ["/models/ERNIE-4.5.tar.gz", "", "abcabc", "a b  c", "x*y", "straße/ß", "a}b{"])
def test_expansions_of_known_variables_are_what_bash_makes_of_them(value, quote):
    lines = [f"x='{value}'\ny=.gz\nrun {quote}${{x{form}}}{quote} end ${{x}}" for form in EXPANSIONS]
    asked = "run() { printf '%s\\1' \"$@\"; printf '\\2'; }\nset -f\n" + "\n".join(lines)
    for line, answer in zip(lines, bash(asked).split("\2"), strict=False):
        assert words(line)[-1][1:] == answer.split("\1")[:-1], line
        assert not any(word.open for word in read_script(line, "run.sh")[-1].words)


@pytest.mark.parametrize(
    "text",
    [
        "${y##*/}",
        "${y:+a}",
        "${y:?none}",
        "${x/a/[&]}",
        "${x@Q}",
        "${!x}",
        "${m##*/}",
        "${m-8}",
        "${x:010}",
        "${x:1:08}",
    ],
)
def test_an_expansion_of_what_is_not_known_stays_as_written(text):
    word = read_script(f"x=abc\nm=$1\nrun {text}", "run.sh")[-1].words[1]
    assert (word.text, word.open) == (text, True)


def test_no_pattern_of_a_script_takes_long():
    began = time.process_time()
    read_script("x=" + "ab" * 40_000 + "\n" + "y=${x//*a*a*a*c/d}\n" * 500 + "y=${x:-" * 900 + "}" * 900, "run.sh")
    assert within(time.process_time() - began, 5)
