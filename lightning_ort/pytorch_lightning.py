"""All classes for ``pytorch_lightning``: those of :mod:`lightning_ort.lightning`, each made again on its own bases.

Both namespaces of Lightning have the same names, so what that module says is run here with the other packages.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_ort.lightning import *  # noqa: F403
else:
    _written: Any = find_spec("lightning_ort.lightning")  # which imports the other Lightning when it is imported
    _source = _written.loader.get_source(_written.name)
    for _theirs, _own in (("lightning.pytorch", "pytorch_lightning"), ("lightning.fabric", "lightning_fabric")):
        _source = _source.replace(f"\nfrom {_theirs}", f"\nfrom {_own}")
    exec(compile(_source, _written.origin, "exec"))
