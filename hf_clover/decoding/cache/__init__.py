"""The cache of keys and values: rows of different lengths, and a static one for graphs."""
