"""Keys and values of the target, by row."""
