"""What a step may read, and whether that has changed.

A step is *closed* when all that decides about its calls can be listed. :class:`World` watches one run (:mod:`.watch`),
reads the code that ran (:mod:`.code`), and walks along the names in it from the step to the objects (:mod:`.listing`,
:mod:`.objects`). What it finds is one flat list (:mod:`.flat`); what the step wrote is told by comparing with what was
there before (:mod:`.memory`). Whose code is read, and whose is trusted, is said by :mod:`.places`. What a function that
only indexes returns is found by :mod:`.indexing`.
"""

from lightning_ort.world.flat import storage_of
from lightning_ort.world.handed_on import HandedOn, Site, attribute, put
from lightning_ort.world.memory import Effect
from lightning_ort.world.modes import loading_compiler
from lightning_ort.world.watch import Opening
from lightning_ort.world.world import World

__all__ = ["Effect", "HandedOn", "Opening", "Site", "World", "attribute", "loading_compiler", "put", "storage_of"]
