"""A tiny model that has learnt three answers by heart, for everything that talks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.checkpoint.model_writer import write_model
from erniekit.data.template import prompt_ids
from erniekit.data.tokenizer import load_tokenizer
from support.serving import Live

# Question -> answer; the first ends in eos, the others in the end-of-sentence token. The last is bytes and an emoji.
LEARNT = {"capital of France?": "Paris.", "two plus two?": "four", "greet me": "你好 😀!"}


@pytest.fixture(scope="session")
def talker(paddle: Path, tmp_path_factory) -> Path:
    tokenizer = load_tokenizer(paddle / "tokenizer")
    rows = []
    for k, (question, answer) in enumerate(LEARNT.items()):
        prompt = prompt_ids([{"role": "user", "content": question}], tokenizer)
        said = [*tokenizer.encode_text(answer), tokenizer.eos_id if k == 0 else tokenizer.end_id]
        ids = torch.tensor([[*prompt, *said]])
        labels = ids.roll(-1, 1)
        labels[:, : len(prompt) - 1] = -100
        labels[:, -1] = -100
        rows.append((ids, labels))
    folder = ModelFolder(paddle / "dense_old")
    model = folder.build()
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(60):
        loss = sum(F.cross_entropy(model(ids)[0], labels[0]) for ids, labels in rows)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert float(loss.detach()) < 0.1
    target = tmp_path_factory.mktemp("talker") / "model"
    write_model(target, folder.config, model.state_dict().__getitem__, tokenizer_from=paddle / "tokenizer")
    return target


@pytest.fixture(scope="module")
def live(talker: Path) -> Iterator[Live]:
    server = Live(talker, "max_model_len=160", "served_model_name=talker")
    yield server
    server.close()
