"""Measurements of heads: benchmark, losslessness, prompts, tables, plots."""
