"""The heads in a call: how they grow trees, and where else drafts come from."""
