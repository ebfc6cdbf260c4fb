"""What a benchmark asks of a model: log-probabilities against plain arithmetic, greedy answers, the absent extra; and
where the extra is installed, the numbers of its own Hugging Face backend."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import erniekit
from erniekit.cli.main import main
from erniekit.data.tokenizer import Tokenizer
from erniekit.demo.tiny import make_tiny_model
from erniekit.errors import ConfigError
from erniekit.recipes import tasks
from erniekit.recipes.tasks import Scorer, TaskGeneration
from support.taught_mtp import taught

HARNESS = importlib.util.find_spec("lm_eval") is not None
PAIRS = [("The cat", " sat on the mat."), ("", "A tale"), ("Blanks at the seam  ", "belong to the answer"), ("x", "")]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory):
    return erniekit.load(make_tiny_model(tmp_path_factory.mktemp("model"), family="llama"), dtype="fp32")


@torch.no_grad()
def by_hand(loaded, before: list[int], answer: list[int]) -> tuple[float, bool]:
    """One token at a time, from whole logits."""
    model, ids, total, greedy = loaded[0], list(before), 0.0, True
    for token in answer:
        told = model(torch.tensor([ids]))[0, -1].log_softmax(-1)
        total, greedy = total + float(told[token]), greedy and int(told.argmax()) == token
        ids.append(token)
    return total, greedy


@pytest.mark.parametrize("batch_size", [1, 3])
def test_scores_are_sums_of_next_token_log_probabilities(loaded, batch_size):
    tokenizer = loaded[1]
    scored = Scorer(*loaded, max_length=64, batch_size=batch_size).score(PAIRS)
    for (context, answer), (score, greedy) in zip(PAIRS, scored):
        both = tokenizer.encode_text(context + answer)
        before = tokenizer.encode_text(context.rstrip())
        ids, start = (both, len(before)) if before else ([tokenizer.bos_id, *both], 1)
        want = by_hand(loaded, ids[:start], ids[start:])
        assert score == pytest.approx(want[0], abs=1e-3)  # fp32 sums of another order
        assert greedy == want[1]


def test_a_context_that_is_too_long_loses_its_beginning(loaded):
    long = "one two three four five six seven eight nine ten " * 8
    ids = loaded[1].encode_text(long + "and")
    ((score, _),) = Scorer(*loaded, max_length=16).score([(long.rstrip(), " and")])
    before = loaded[1].encode_text(long.rstrip())
    count = len(ids) - len(before)
    assert score == pytest.approx(by_hand(loaded, ids[-17:-count], ids[-count:])[0], abs=1e-3)


def test_every_token_of_a_long_text_is_scored_once_and_the_last_window_is_a_whole_one(loaded):
    text = "Emil gave the paper kite to Ivo, and Ivo took it home. " * 3
    ids = loaded[1].encode_text(text)
    last = len(ids) // 16 * 16
    assert len(ids) > 32
    assert last < len(ids)
    want = by_hand(loaded, [loaded[1].bos_id], ids[:16])[0]
    want += sum(by_hand(loaded, [ids[k - 1]], ids[k : k + 16])[0] for k in range(16, last, 16))
    want += by_hand(loaded, ids[-17:last], ids[last:])[0]
    assert Scorer(*loaded, max_length=16).score_whole([text]) == [pytest.approx(want, abs=5e-3)]


def test_a_tokenizer_that_opens_every_text_with_bos_opens_these_too(loaded):
    model, tokenizer = loaded[0], copy.copy(loaded[1])
    tokenizer.begin_id = bos = tokenizer.bos_id  # as a Llama folder without ERNIE's sentence tokens has it
    scorer, ids = Scorer(model, tokenizer, max_length=64), tokenizer.encode_text("A tale of two")
    before = tokenizer.encode_text("A tale")
    want = by_hand(loaded, [bos, *before], ids[len(before) :])[0]
    assert scorer.score([("A tale", " of two")])[0][0] == pytest.approx(want, abs=1e-3)
    assert scorer.score_whole(["A tale of two"]) == [pytest.approx(by_hand(loaded, [bos], [bos, *ids])[0], abs=1e-3)]
    first = int(model(torch.tensor([[bos, *ids]]))[0, -1].argmax())
    assert scorer.generate("A tale of two", [], 1) == tokenizer.decode([first])


def test_generation_is_greedy_and_ends_before_a_stop_word(loaded):
    scorer = Scorer(*loaded, max_length=64)
    whole = scorer.generate("The cat", [], 8)
    ids = loaded[1].encode_text("The cat")
    said: list[int] = []
    for _ in range(8):
        said.append(int(loaded[0](torch.tensor([ids + said]))[0, -1].argmax()))
    assert whole == loaded[1].decode(said)
    stop = whole[len(whole) // 2]
    assert scorer.generate("The cat", [stop], 8) == whole.split(stop, 1)[0]


def test_no_token_is_generated_after_a_stop_word(loaded):
    scorer = Scorer(*loaded, max_length=64)
    whole = scorer.generate("The cat", [], 8)
    engine = scorer.engine.engine
    before = engine.load().steps
    scorer.generate("The cat", [whole[0]], 40)
    # The first token ends it; the engine may be a few steps ahead of who reads the text.
    assert engine.load().steps - before < 30
    scorer.close()


def test_answers_to_several_questions_are_computed_together_and_are_those_of_each_alone(loaded):
    together, alone = Scorer(*loaded, max_length=64, seed=3), Scorer(*loaded, max_length=64, seed=3)
    asked = [
        ("The cat", TaskGeneration([], 8)),
        ("A tale of two", TaskGeneration([], 5)),
        ("Emil", TaskGeneration(["a"], 12)),
    ]
    drawn = [(text, how._replace(temperature=1.5)) for text, how in asked]
    try:
        assert together.generate_all(asked) == [alone.generate(text, *how) for text, how in asked]
        steps = together.engine.engine.load().steps
        assert steps < alone.engine.engine.load().steps
        assert together.generate_all(drawn) == together.generate_all(drawn), "a seed is followed"
        assert together.generate_all([]) == []
        ids = torch.tensor([[5, 6, 7]])
        assert torch.equal(loaded[0](ids), together.model(ids)), "the engine has modules of its own"
    finally:
        together.close()
        alone.close()


def test_an_answer_that_leaves_no_room_for_the_question_is_refused(loaded):
    with pytest.raises(ConfigError, match="answers of up to 16 tokens"):
        Scorer(*loaded, max_length=16).generate("The cat", [], 16)


def test_generation_settings_have_the_names_and_defaults_of_the_harness():
    want = {"until": [], "max_tokens": 256, "temperature": 0.0, "top_p": 1.0, "top_k": 0}
    assert tasks.generation({}) == want
    assert tasks.generation({"max_new_tokens": 5, "num_beams": 1}) == {**want, "max_tokens": 5}
    assert tasks.generation({"max_tokens": 5, "max_gen_toks": 7, "until": "\n"}) == {
        **want,
        "max_tokens": 7,
        "until": ["\n"],
    }
    warm = {"temperature": 0.7, "top_p": 0.9, "top_k": 5}
    assert tasks.generation({**warm, "do_sample": True}) == tasks.generation(warm) == {**want, **warm}
    assert tasks.generation({**warm, "do_sample": False})["temperature"] == 0.0
    with pytest.raises(ConfigError, match="num_beams=10"):
        tasks.generation({"num_beams": 10})


def test_the_harness_is_answered_through_its_own_interface(loaded):
    """Its LM class is all that we build on; requests carry their words in `args`."""
    harness = SimpleNamespace(api=SimpleNamespace(model=SimpleNamespace(LM=object)))
    scorer = Scorer(*loaded, max_length=64)
    lm = tasks.language_model(harness, scorer)
    ask = [SimpleNamespace(args=pair) for pair in PAIRS]
    assert lm.loglikelihood(ask) == scorer.score(PAIRS)
    assert lm.loglikelihood_rolling([SimpleNamespace(args=("A tale",))]) == scorer.score_whole(["A tale"])
    settings = {"until": "\n", "max_gen_toks": 4}
    assert lm.generate_until([SimpleNamespace(args=("A", settings))]) == [scorer.generate("A", ["\n"], 4)]


@pytest.fixture(scope="module")
def proposing(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Tokenizer]:
    """A model whose MTP layer has learnt some of its answers."""
    folder = make_tiny_model(tmp_path_factory.mktemp("moe"), family="ernie4_5_moe", layers=2)
    model, tokenizer = erniekit.load(folder, dtype="fp32")
    return taught(model, [tokenizer.encode_text("The cat"), tokenizer.encode_text("A tale of two")]), tokenizer


def test_proposals_of_the_mtp_layer_change_no_answer(proposing):
    asked = [("The cat", TaskGeneration([], 12)), ("A tale of two", TaskGeneration(["e"], 12))]
    asked += [("Emil", TaskGeneration([], 12, temperature=1.0))]
    plain, ahead = Scorer(*proposing, max_length=64), Scorer(*proposing, max_length=64, proposals=2)
    try:
        assert ahead.generate_all(asked) == plain.generate_all(asked)
        load = ahead.engine.engine.load()
        assert 0 < load.proposals_held < load.proposed
    finally:
        plain.close()
        ahead.close()


@pytest.mark.parametrize(
    ("family", "request_kind", "words", "proposed", "note"),
    [
        ("ernie4_5_moe", "generate_until", [], True, ""),
        ("ernie4_5_moe", "loglikelihood", [], False, "these tasks score texts and generate none"),
        ("ernie4_5_moe", "generate_until", ["decoding=exact"], False, "one token after the other"),
        ("ernie4_5", "generate_until", [], False, "the model's files hold no MTP layer"),
    ],
)
def test_speculative_tokens_of_the_command_line_are_proposed_or_a_line_says_why_not(
    family, request_kind, words, proposed, note, tmp_path, monkeypatch, capsys
):
    """Of the harness only its interface stands here."""
    scorers, wrap = [], tasks.language_model

    def evaluate(model, **how):
        given = {"generate_until": ("A tale", {"max_gen_toks": 8}), "loglikelihood": ("A", " tale")}[request_kind]
        getattr(model, request_kind)([SimpleNamespace(args=given)])
        scorers.append(model.scorer.engine and model.scorer.engine.engine.load().proposed)
        return {"results": {"mine": {"acc,none": 0.5}}}

    def language_model(harness, scorer):
        made = wrap(harness, scorer)
        made.scorer = scorer
        return made

    manager = SimpleNamespace(match_tasks=list, all_tasks=["mine"])
    api = SimpleNamespace(model=SimpleNamespace(LM=type("LM", (), {})))
    harness = SimpleNamespace(api=api, tasks=SimpleNamespace(TaskManager=lambda: manager), simple_evaluate=evaluate)
    monkeypatch.setattr(tasks, "import_harness", lambda: harness)
    monkeypatch.setattr(tasks, "language_model", language_model)
    folder = make_tiny_model(tmp_path / "model", family=family, layers=2)
    out = ["--model_name_or_path", str(folder), "--output_dir", str(tmp_path / "out"), "--device", "cpu"]
    assert main(["eval", *out, "--tasks", "mine", "num_speculative_tokens=2", *words]) == 0
    assert bool(scorers[0]) is proposed
    told = [line for line in capsys.readouterr().err.splitlines() if "num_speculative_tokens" in line]
    assert len(told) == bool(note)
    assert all(note in line for line in told)


def test_results_are_flat_numbers():
    told = {"hellaswag": {"alias": "hellaswag", "sample_len": 9, "acc,none": 0.5, "f1,strict": 0.25, "x,none": "N/A"}}
    assert dict(tasks.flat(told)) == {"hellaswag/acc": 0.5, "hellaswag/f1,strict": 0.25}


@pytest.mark.skipif(HARNESS, reason="the extra is installed")
def test_without_the_extra_it_says_what_to_install(tmp_path, capsys):
    assert main(["eval", "--model_name_or_path", str(tmp_path), "--tasks", "hellaswag,arc_easy"]) == 2
    assert 'pip install "erniekit-torch[tasks]"' in capsys.readouterr().err


TASKS = {
    "choice": {"output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_choice": "c", "doc_to_target": 1},
    "alone": {"output_type": "multiple_choice", "doc_to_text": "", "doc_to_choice": "c", "doc_to_target": 1},
    "page": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{q * 20}}"},
    "answer": {
        "output_type": "generate_until",
        "doc_to_text": "{{q}}",
        "doc_to_target": "{{c[0]}}",
        "generation_kwargs": {"until": ["e"], "max_gen_toks": 12},
    },
}
METRICS = {"loglikelihood_rolling": "bits_per_byte", "generate_until": "exact_match", "multiple_choice": "acc"}


def write_tasks(folder: Path) -> list[str]:
    """JSON is YAML, too."""
    rows = [{"q": f"Ivo has {k} kites, and Emil", "c": [" sings", f" took {k} home"]} for k in range(6)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name, task in TASKS.items():
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}}}
        metric = {"metric_list": [{"metric": METRICS[task["output_type"]]}], "test_split": "test"}
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **task, **data, **metric}), encoding="utf-8")
    return [str(folder / f"{name}.yaml") for name in TASKS]


def hush_bytes(folder: Path) -> None:
    """Bytes that are no text are spelled differently by the two tokenizers: no byte piece is ever the likeliest."""
    tokenizer = erniekit.load(folder)[1]
    bytes_ = [id for id, piece in enumerate(tokenizer.pieces(range(len(tokenizer)))) if piece.startswith("<0x")]
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if "embed_tokens" in name or "lm_head" in name:
            weights[name][bytes_] = 0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.full
@pytest.mark.skipif(not HARNESS, reason="the extra is not installed")
def test_answers_are_those_of_the_hugging_face_backend(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder, files = make_tiny_model(tmp_path / "model"), write_tasks(tmp_path)
    hush_bytes(folder)
    harness = tasks.import_harness()
    ours = tasks.language_model(harness, Scorer(*erniekit.load(folder, dtype="fp32"), max_length=32, batch_size=2))
    theirs = {"pretrained": str(folder), "dtype": "float32", "max_length": 32}
    how = {"tasks": files, "bootstrap_iters": 0, "task_manager": harness.tasks.TaskManager(include_defaults=False)}
    told = harness.simple_evaluate(model=ours, **how)
    want = harness.simple_evaluate(model="hf", model_args=theirs, device="cpu", **how)
    for name in TASKS:
        for sample, expected in zip(told["samples"][name], want["samples"][name]):
            for (answer,), (right,) in zip(sample["resps"], expected["resps"]):
                assert answer == (right if isinstance(right, str) else pytest.approx(right, abs=1e-3))
    assert dict(tasks.flat(told["results"])) == pytest.approx(dict(tasks.flat(want["results"])), abs=1e-4)


@pytest.mark.full
@pytest.mark.skipif(not HARNESS, reason="the extra is not installed")
def test_a_task_file_and_a_mistyped_name_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder, out = make_tiny_model(tmp_path / "model"), tmp_path / "out"
    words = ["eval", "--model_name_or_path", str(folder), "--output_dir", str(out), "--device", "cpu"]
    assert main([*words, "--tasks", str(write_tasks(tmp_path)[0])]) == 0
    assert "choice/acc" in json.loads((out / "eval_results.json").read_text(encoding="utf-8"))
    assert main([*words, "--tasks", "helaswag"]) == 2
    assert "did you mean hellaswag" in capsys.readouterr().err
