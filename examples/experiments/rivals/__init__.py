"""Draft heads of other papers, written from those papers, to stand beside ours in `learning.py`.

Contract: a rival is `CloverHeads` to whoever trains it or generates with it: `Rival.from_target(target)` makes it,
`CloverTrainer` trains it, and inside `with admitted():` the real `model.generate(..., assistant_model=rival)` drafts
with it. Tree, budget, verification, walk and cache are the library's own, so that only the drafter differs. Medusa is
not here, since the library has it as a variant.
"""

from .base import RivalHeads, admitted
from .eagle1 import Eagle1
from .eagle3 import Eagle3
from .hydra import Hydra

RIVALS: dict[str, type[RivalHeads]] = {rival.name: rival for rival in (Eagle1, Eagle3, Hydra)}

__all__ = ["RIVALS", "Eagle1", "Eagle3", "Hydra", "RivalHeads", "admitted"]
