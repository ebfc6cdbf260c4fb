"""The process that reads the export in transformers: what the demo says when it cannot."""

from __future__ import annotations

import pytest

from erniekit.demo import ProofFailed
from erniekit.demo.transformers_process import TransformersProcess


def test_a_process_that_died_is_a_failed_proof_with_its_log(tmp_path):
    stack = TransformersProcess(tmp_path / "transformers.log")
    stack._process.kill()
    stack._process.wait()
    with pytest.raises(ProofFailed, match="could not read") as failed:
        stack.query(tmp_path, [1], [1], [2], tmp_path / "logits")
    stack.close()
    assert failed.value.where == str(tmp_path / "transformers.log")
    assert failed.value.exit_code == 1
