"""Files that are there whole, or as they were before, whatever happens while they are written."""

from pathlib import Path


def write_whole(path: Path, text: str) -> Path:
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    return unfinished.replace(path)


__all__ = ["write_whole"]
