"""The target in a call: its forwards, and what is measured and remembered about it."""
