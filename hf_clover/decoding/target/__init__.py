"""The target in a call: its forwards, and what must be known of it."""
