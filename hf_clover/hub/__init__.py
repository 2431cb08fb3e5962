"""How heads are published on the Hub: the pushed folder, its model card, and the code that `generate` loads."""
