"""The offline demo: a tiny model and the data it carries. Run by recipes/demo.py; tests use the tiny model, too."""

from erniekit.errors import ErnieKitError


class ProofFailed(ErnieKitError):
    """A stage of the demo did not do what it should."""

    exit_code = 1
