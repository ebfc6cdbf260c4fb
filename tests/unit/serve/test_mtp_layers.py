"""The MTP layer of a served model: read where it proposes tokens, and nowhere else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from erniekit.api_load import find_model
from erniekit.config import load
from erniekit.demo.tiny import make_tiny_model
from erniekit.serve.loaded_models import LoadedModels, find_models, load_models
from erniekit.serve.metrics import Metrics
from support.engine_jobs import answers, job, make_adapter, prompts


@pytest.fixture(scope="module")
def moe(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "moe", family="ernie4_5_moe")


def loaded(*words: str) -> LoadedModels:
    cfg = load([*words, "device=cpu", "max_model_len=64", "block_size=8"], "server")
    return load_models(cfg, find_models(cfg))


def test_it_is_read_only_where_it_proposes_and_the_metrics_say_how_often_it_is_right(moe: Path, tmp_path: Path):
    make_adapter(find_model(moe).weights, tmp_path / "style", 1)
    words = (str(moe), f"lora_modules=style={tmp_path / 'style'}")
    plain, proposing = loaded(*words), loaded(*words, "num_speculative_tokens=2")
    try:
        for name in ("moe", "style"):
            assert len(plain.engine.models[name].mtp) == 0
            assert len(proposing.engine.models[name].mtp) == 1
        assert "2 tokens proposed at a time" in proposing.about
        jobs = [job(p, name) for p in prompts(3) for name in ("moe", "style")]
        assert answers(proposing.engine, jobs) == answers(plain.engine, jobs)
        text = Metrics().text(proposing.engine.load())
        proposed, held, share = (
            float(re.search(rf"^erniekit_{name} (.+)$", text, re.MULTILINE)[1])
            for name in ("proposed_tokens_total", "accepted_tokens_total", "acceptance_ratio")
        )
        assert proposed > 0
        assert share == pytest.approx(held / proposed, abs=1e-6)
        assert "erniekit_proposed_tokens_total 0\n" in Metrics().text(plain.engine.load())
    finally:
        plain.engine.stop()
        proposing.engine.stop()


@pytest.mark.parametrize(
    ("family", "words", "reason"),
    [("ernie4_5", (), "hold no MTP layer"), ("ernie4_5_moe", ("decoding=exact",), "one token after the other")],
)
def test_where_nothing_can_be_proposed_one_line_says_why_and_decoding_is_plain(
    family: str, words: tuple[str, ...], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = make_tiny_model(tmp_path / "model", family=family)
    made = loaded(str(folder), "num_speculative_tokens=1", *words)
    made.engine.stop()
    told = [line for line in capsys.readouterr().err.splitlines() if "num_speculative_tokens" in line]
    assert len(told) == 1
    assert reason in told[0]
    assert made.engine.limits.proposals == 0
