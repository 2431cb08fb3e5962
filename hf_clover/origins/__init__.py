"""How heads are made: with first weights from the target, or from checkpoints that others published."""
