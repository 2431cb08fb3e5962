"""How heads come to be: a target is loaded, and its last layer, norms and scales make the first weights."""
