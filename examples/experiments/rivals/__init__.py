"""Draft heads of other papers, written from those papers, to stand beside ours in `learning.py`.

Contract: a rival is `CloverHeads` to whoever trains it or generates with it: `Rival.from_target(target)` makes it,
`Rival.trainer` (`CloverTrainer`, or one with another loss) trains it, and `model.generate(..., assistant_model=rival)`
drafts with it. Tree, budget, verification, walk and cache are the library's own, so that only the drafter differs.
Medusa and EAGLE-3 are not here, since the library has them.
"""

from .base import RivalHeads
from .dflash import DFlash
from .dspark import DSpark
from .eagle1 import Eagle1
from .hydra import Hydra

RIVALS: dict[str, type[RivalHeads]] = {rival.name: rival for rival in (Eagle1, DFlash, DSpark, Hydra)}

__all__ = ["RIVALS", "DFlash", "DSpark", "Eagle1", "Hydra", "RivalHeads"]
