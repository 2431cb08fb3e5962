"""The rooms of the package: imports run one way and never in a circle, and private names have one home."""

import re
from graphlib import TopologicalSorter

import pytest
from helpers.imports import MODULES, PACKAGE, ROOT, imported

# From what knows least to what knows most; a room imports what stands before it.
ROOMS = ("network", "engines", "targets", "origins", "decoding", "measure", "hub", "training", "apps", "cli")
FACE = ("__init__", "_versions")
PRIVATE = re.compile(r"\b(?:target|model|config|cache|GenerationMixin|torch|trainer)\._[a-z]\w*")


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_the_package_holds_its_rooms_and_two_modules_beside_them():
    names = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert names == {*ROOMS, *FACE}
    assert len(names) <= 13


def test_imports_between_rooms_run_one_way():
    wrong = [
        f"{module} imports {other}"
        for module, file in MODULES.items()
        for other in imported(file)
        if room_of(module) in ROOMS
        and room_of(other) in ROOMS
        and ROOMS.index(room_of(other)) > ROOMS.index(room_of(module))
    ]
    assert not wrong


def test_no_modules_import_each_other_in_a_circle():
    """Imports inside functions count, too; a package that only names its modules is left out."""
    graph = {
        module: {other for other, is_run in imported(file).items() if is_run and other != module}
        for module, file in MODULES.items()
        if file.name != "__init__.py"
    }
    order = [*TopologicalSorter(graph).static_order()]  # raises on a circle
    assert order.index("hf_clover.decoding.loop") < order.index("hf_clover.decoding.hook")


def test_modules_of_the_network_import_no_other_room():
    for module, file in MODULES.items():
        if room_of(module) == "network":
            assert {room_of(other) for other in imported(file)} <= {"network"}, module


@pytest.mark.parametrize("room", [room for room in ROOMS if room != "network"])
def test_private_names_of_other_libraries_stand_in_private_api_only(room):
    """They are looked for behind the names of the libraries' classes, and of their objects in these rooms."""
    for file in (PACKAGE / room).rglob("*.py"):
        if file.stem != "private_api":
            assert not PRIVATE.findall(file.read_text()), file.relative_to(ROOT)


def test_contributing_names_every_room_in_order():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert re.findall(r"^\| `hf_clover/(\w+)/`", page, re.MULTILINE) == list(ROOMS)
