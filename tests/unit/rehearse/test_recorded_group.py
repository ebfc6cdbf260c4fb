"""What a rehearsed rank gets from ranks that do not exist."""

from __future__ import annotations

import torch
import torch.distributed as dist

from erniekit.rehearse.recorded_group import opened


def test_hidden_states_from_another_stage_differ_from_token_to_token() -> None:
    """Else a router would send all tokens of a rank that is run for real to the same experts."""
    hidden, vote = torch.zeros(1, 4, 8), torch.zeros(1, dtype=torch.int64)
    with opened(1, 2) as trace:
        for room in (hidden, vote):
            dist.recv(room, src=0)
    assert len({tuple(token.tolist()) for token in hidden[0]}) == 4
    assert vote.tolist() == [1]
    assert [call.op for call in trace.calls] == ["recv", "recv"]
