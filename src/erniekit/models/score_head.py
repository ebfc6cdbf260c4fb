"""A score head in the place of the LM head: classes of a sequence, or its reward, as transformers'
...ForSequenceClassification stores them. Used by models/spec.py and checkpoint/model_folder.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from erniekit.errors import CheckpointError

if TYPE_CHECKING:
    from erniekit.models.names import Entry

ARCHITECTURE = "ForSequenceClassification"
WEIGHT = "score.weight"  # our name and theirs
MOST = 10_000  # classes


def is_head(name: str) -> bool:
    """Whether another world's tensor is of an LM head."""
    return name.startswith("lm_head.")


def entries(names: list[Entry]) -> list[Entry]:
    from erniekit.models.names import verbatim

    return [*(e for e in names if not any(map(is_head, e.theirs))), verbatim(WEIGHT, WEIGHT)]


def labels_in(raw: dict[str, Any], where: str) -> tuple[str, ...]:
    """The classes a config.json names; none where its model is a language model. transformers leaves out id2label of
    two classes without names."""
    kinds = raw.get("architectures")
    if not isinstance(kinds, list) or not any(isinstance(k, str) and k.endswith(ARCHITECTURE) for k in kinds):
        return ()
    named = raw.get("id2label")
    if named is None:
        count = raw.get("num_labels", 2)
        named = {str(i): f"LABEL_{i}" for i in range(count)} if isinstance(count, int) and 0 < count <= MOST else None
    places = [str(i) for i in range(len(named))] if isinstance(named, dict) else []
    if not isinstance(named, dict) or not 0 < len(named) <= MOST or set(named) != set(places):
        raise CheckpointError(
            "id2label does not name classes 0, 1, 2 ...", where=f"{where}, key id2label", fix="download it again"
        )
    return tuple(str(named[place]) for place in places)


def refuse(labels: Sequence[str], what: str, where: str) -> None:
    """For whatever continues a text: a model with a score head cannot."""
    if labels:
        raise CheckpointError(
            f"{what} needs a language model; this one has a score head ({', '.join(labels[:4])})",
            where=where,
            fix="`erniekit eval` with stage: CLS or RM reads it, and so does transformers' " + ARCHITECTURE,
        )


def changes(raw: dict[str, Any], labels: Sequence[str]) -> dict[str, Any]:
    """Values of config.json that make a language model one with a head for these classes."""
    named = next((k for k in raw.get("architectures") or [] if isinstance(k, str)), "")
    kind = named.replace("ForCausalLM", ARCHITECTURE)
    return {
        "architectures": [kind if kind.endswith(ARCHITECTURE) else ARCHITECTURE],
        "id2label": {str(i): name for i, name in enumerate(labels)},
    }


def written(config: dict[str, Any], labels: Sequence[str]) -> dict[str, Any]:
    """config.json of such a model. transformers pads batches with pad_token_id, which must be there."""
    kinds = [kind.replace("ForCausalLM", ARCHITECTURE) for kind in config["architectures"]]
    pad = config.get("pad_token_id")
    return {
        **config,
        "architectures": kinds,
        "id2label": {str(i): name for i, name in enumerate(labels)},
        "label2id": {name: i for i, name in enumerate(labels)},
        "pad_token_id": pad if pad is not None else config.get("eos_token_id"),
    }
