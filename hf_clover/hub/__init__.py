"""How heads reach the Hub: the folder that is pushed, its card, and the code that `generate` loads from there."""
