"""Heads inside engines other than transformers' `generate`."""
