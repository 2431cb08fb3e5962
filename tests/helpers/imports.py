"""What a file imports of the package, read without running it."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hf_clover"


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(file): file for file in PACKAGE.rglob("*.py")}


def imported(file: Path) -> dict[str, bool]:
    """Modules of the package that a file imports, in functions too -> whether a program ever does so."""
    package = name_of(file) if file.name == "__init__.py" else name_of(file).rpartition(".")[0]
    found: dict[str, bool] = {}

    def visit(node: ast.AST, is_run: bool) -> None:
        if isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                module = f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base
                if module in MODULES:
                    found[module] = found.get(module, False) or is_run
        is_for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in ast.iter_child_nodes(node):
            visit(child, is_run and not is_for_types)

    visit(ast.parse(file.read_text()), is_run=True)
    return found
