"""How many nodes a tree gets."""
