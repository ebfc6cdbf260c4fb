"""Which files are ours: the record kept in every folder erniekit writes into, and the checks made from it.

Every folder of code that writes outside a checkpoint checks here first; checkpoints and exports carry a MANIFEST.json
instead.
"""

from erniekit.files.json_file import read_object
from erniekit.files.record import RECORD, NotOurs, OwnedFiles, own, settle
from erniekit.files.special import refuse_special

__all__ = ["RECORD", "NotOurs", "OwnedFiles", "own", "read_object", "refuse_special", "settle"]
