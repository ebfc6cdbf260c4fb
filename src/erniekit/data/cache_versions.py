"""Versions of what is derived from data. Raise one by hand when the same input would give another result: caches of
another version are not used, and a run of another version is not resumed. tests/unit/data/test_cache_versions.py has a
recorded digest for each and fails when a result changes under an old number; any other edit of the code is free.
"""

from __future__ import annotations

SAMPLES = 3  # a row of a dataset file -> ids and labels: formats, template, assembling
# 2: white space at the ends of `src`, `tgt` and alpaca texts is kept
# 3: thoughts and tool calls that stand on a row beside its answers are read
DOCUMENTS = 1  # text -> token files for pre-training
ORDER = 1  # which sample or document comes at which place, and how they share rows: mix, pack, compat, documents, blend
VISION = 2  # a row with pictures -> ids, labels, positions, and which patches: data/vision, data/media
# 2: thoughts that stand beside texts are read, rows with `tools` are bad rows
REFERENCE = 1  # the log-probabilities kept for DPO
