"""The heads in a call: how they grow trees, and the other sources of drafts."""
