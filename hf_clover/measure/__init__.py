"""What is said about heads, and how it is found out: benchmark, losslessness, prompts, tables, plots."""
