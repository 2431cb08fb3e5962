"""A benchmark's result, with figures that nobody has measured."""

from typing import Any

PARTS = ("draft", "verify", "walk", "other")


def row_of(method: str, rate: float, per_forward: float, speedup: float, **fields: Any) -> dict[str, Any]:
    """`rate`: tokens per second."""
    settings = {"nodes": None, "tree": None, "batch_size": 1, "temperature": 0.0, "cache": "dynamic"}
    figures = {"tokens_per_second": rate, "tokens_per_forward": per_forward, "speedup": speedup}
    ranges = {f"{name}_range": [0.9 * figures[name], 1.2 * figures[name]] for name in ("tokens_per_second", "speedup")}
    others = {"efficiency": speedup / per_forward, "seconds": dict.fromkeys(PARTS, 0.0), "acceptance_by_depth": []}
    of_text = {"identical": True, "differences": [], "skipped": None}
    return {"method": method, **settings, **figures, **ranges, **others, **of_text, **fields}


def benchmark_of(rows: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    where = {"target": "t", "dtype": "float32", "device": "cpu", "machine": "a processor, 2 cores"}
    what = {"prompts": "stand-in", "num_prompts": 8, "max_new_tokens": 9, "repeats": 3}
    return {"kind": "benchmark", **where, **what, "rows": rows, **fields}
