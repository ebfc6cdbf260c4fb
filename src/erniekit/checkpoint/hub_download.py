"""A model from the Hugging Face hub into its own cache, where a network exists. Called by hub.py only.

Only files that describe and hold a model are taken: no code, no pickles.
"""

from __future__ import annotations

import sys
from pathlib import Path

from erniekit.errors import CheckpointError
from erniekit.log import emit

TAKEN = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "README.md", "LICENSE*")


def download(name: str, command: str) -> Path:
    """The cached snapshot of hub id `name`; `command` downloads it by hand, for machines without a network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        _announce(name)
        return Path(snapshot_download(name, allow_patterns=list(TAKEN)))
    except GatedRepoError:
        what, fix = "needs its terms accepted on its page", f"accept them, then: hf auth login; {command}"
    except RepositoryNotFoundError:
        what, fix = "is not on the Hugging Face hub, or is private", "check the name; hf auth login for a private one"
    except (LocalEntryNotFoundError, OSError) as error:
        what = "is neither a folder here nor in the download cache, and the Hugging Face hub cannot be reached"
        fix = f"download it where there is a network: {command}" if not _is_full(error) else "make room on the disk"
        what = f"cannot be stored: {error}" if _is_full(error) else what
    raise CheckpointError(f"model {name!r} {what}", where="model_name_or_path", fix=fix)


def _announce(name: str) -> None:
    """Its size before the first byte. Raises as the download would."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        found = HfApi().model_info(name, files_metadata=True, timeout=10)
    except (HfHubHTTPError, OSError):
        raise
    except Exception as error:  # the client's own kinds of network errors differ from version to version
        raise ConnectionError(str(error)) from None
    size = sum(file.size or 0 for file in found.siblings or () if Path(file.rfilename).match("*.safetensors"))
    emit(f"download {name} from the Hugging Face hub ({size / 1e9:,.2f} GB of weights), once; then it is in the cache")


def _is_full(error: BaseException) -> bool:
    import errno

    return isinstance(error, OSError) and error.errno == errno.ENOSPC
