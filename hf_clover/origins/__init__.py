"""How heads come to be: first weights from the target, or checkpoints that others made."""
