"""The files of a tokenizer, by name: what is read, copied with a model, and refused where it was added later."""

from __future__ import annotations

SENTENCEPIECE_NAMES = ("tokenizer.model", "spm.model", "ernie_token_100k.model")
SETTINGS_NAMES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TOKENIZER_FILES = (*SENTENCEPIECE_NAMES, "tokenizer.json", *SETTINGS_NAMES, "chat_template.jinja")
