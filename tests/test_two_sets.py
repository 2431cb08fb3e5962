"""Which tests of the long set run: those about files that have changed. And what the two sets name is there."""

import ast
import re
import subprocess
from types import SimpleNamespace

import pytest
from helpers.imports import MODULES, imported


@pytest.fixture
def sets(request):
    """The module that chooses: tests/conftest.py."""
    return request.config.pluginmanager.get_plugin(str(request.config.rootpath / "tests" / "conftest.py"))


def item(sets, path, *about, is_long=True, is_file_long=False):
    """A test as pytest collects it, in a file of that path; the mark is its own or its file's."""
    test = SimpleNamespace(path=sets.ROOT / path)
    marks = [(SimpleNamespace() if is_file_long else test, SimpleNamespace(args=about))] if is_long else []
    test.iter_markers_with_node = lambda name: iter(marks)
    return test


@pytest.mark.parametrize(
    ("changed", "runs"),
    [
        ([], False),
        (["hf_clover/hub/push.py"], True),
        (["hub_cards/heads.md"], True),
        (["hf_clover/hub_of_another.py", "hf_clover/decoding/walk.py", "hub_cards.md"], False),
        (["README.md", "tests/test_serving.py"], True),
        (["tests/helpers/tiny_text.py"], True),
        (["tests/helpers/fitting.py"], True),  # which that imports
        (["tests/helpers/zoo.py"], False),
        (["constraints.txt"], True),
        (["tests/conftest.py"], True),
    ],
)
def test_a_long_test_runs_where_a_file_it_is_about_has_changed(sets, changed, runs):
    """Its own file, helpers that it imports, and what concerns all tests count too."""
    assert sets._is_for(item(sets, "tests/test_serving.py", "hf_clover/hub", "hub_cards"), changed) is runs
    assert sets._is_for(item(sets, "tests/test_serving.py", is_long=False), changed)


IMPORTS = """
import torch, hf_clover.training.online
from hf_clover import CloverHeads, _versions, cli
from hf_clover.decoding.target.trees import TargetRun
from hf_clover.hub import cards
from hf_clover.measure.benchmark import plain

def test():
    from hf_clover.decoding import loop
"""


def test_imports_show_rooms(sets, tmp_path):
    """Of decoding/, which most tests run through, modules; a name that the package itself exports shows nothing."""
    (tmp_path / "file.py").write_text(IMPORTS)
    rooms = {f"hf_clover/{room}" for room in ("training", "cli", "hub", "measure")}
    modules = {f"hf_clover/{module}.py" for module in ("_versions", "decoding/target/trees", "decoding/loop")}
    assert sets._rooms_imported(tmp_path / "file.py") == rooms | modules


def test_a_file_that_is_all_long_is_about_the_rooms_that_it_imports(sets):
    """Beside a long test of its own, short ones run whatever has changed."""
    for is_file_long in (True, False):
        test = item(sets, "tests/test_serving.py", is_file_long=is_file_long)
        assert sets._is_for(test, ["hf_clover/apps/wire.py"]) is is_file_long
        assert not sets._is_for(test, ["hf_clover/__init__.py", "hf_clover/network/blocks.py"])


def test_new_figures_run_only_tests_that_name_them(sets):
    """Not for those of the scripts that made them."""
    about_all, about_one = ("examples/experiments",), ("examples/smollm2", f"{sets.FIGURES}smollm2.json")
    changed = [f"{sets.FIGURES}smollm2.json", f"{sets.FIGURES}smollm2.md"]
    assert not sets._is_for(item(sets, "tests/test_experiments.py", *about_all), changed)
    assert sets._is_for(item(sets, "tests/test_experiments.py", *about_all), ["examples/experiments/step_costs.py"])
    assert sets._is_for(item(sets, "tests/test_smollm2.py", *about_one), changed)
    assert not sets._is_for(item(sets, "tests/test_smollm2.py", *about_one), changed[1:])


def test_a_moved_file_counts_as_changed_in_both_places(sets, tmp_path, monkeypatch):
    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(("git", *who, *words), cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    git("init", "--quiet")
    (tmp_path / "old.py").write_text("the same lines\n" * 9)
    (tmp_path / "same.py").write_text("")
    git("add", ".")
    git("commit", "--quiet", "-m", "before")
    before = git("rev-parse", "HEAD").strip()
    git("mv", "old.py", "new.py")
    git("commit", "--quiet", "-m", "moved")
    (tmp_path / "same.py").write_text("not committed")
    monkeypatch.setattr(sets, "ROOT", tmp_path)
    assert sorted(sets._changed_since(before)) == ["new.py", "old.py", "same.py"]
    assert sets._changed_since(None) == []
    with pytest.raises(subprocess.CalledProcessError):
        sets._changed_since("no-such-commit")


def marks_in(file):
    """Of each mark `long`: the paths that it names, and whether it is for the whole file."""
    tree = ast.parse(file.read_text())
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    of_file = [node for node in assigned if ast.unparse(node.targets[0]) == "pytestmark"]
    for_all = {id(part) for node in of_file for part in ast.walk(node)}
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "long" and ast.unparse(node) == "pytest.mark.long":
            arguments = calls[id(node)].args if id(node) in calls else []
            yield [ast.literal_eval(argument) for argument in arguments], id(node) in for_all


@pytest.fixture(scope="module")
def marks(request):
    """Of all test files: a file's path, and what `marks_in` says of it."""
    root = request.config.rootpath
    files = {file.relative_to(root).as_posix(): file for file in sorted((root / "tests").rglob("test_*.py"))}
    return [(path, *mark) for path, file in files.items() for mark in marks_in(file)]


def test_every_path_that_a_mark_names_exists(sets, marks):
    """A mark with a path that was moved would never be run for a change."""
    assert sum(len(paths) for _, paths, _ in marks) > 50
    assert {path for _, paths, _ in marks for path in paths if not (sets.ROOT / path).exists()} == set()


def test_a_mark_names_what_imports_do_not_show(sets, marks):
    """And is about something. A long test in a file of short ones names all that it is about."""
    for file, paths, is_file_long in marks:
        if not is_file_long:
            assert paths, f"{file}: a long test says what it is about"
            continue
        assert paths or sets._rooms_imported(sets.ROOT / file), f"{file}: a long file says what it is about"
        without = item(sets, file, is_file_long=True)
        of_each = {path: path if (sets.ROOT / path).is_file() else f"{path}/a_file" for path in paths}
        assert [path for path, one in of_each.items() if sets._is_for(without, [one])] == [], f"{file} imports these"


def test_a_long_file_runs_where_a_module_that_it_imports_has_changed(sets, marks):
    seen = 0
    for file, _, is_file_long in marks:
        modules = imported(sets.ROOT / file).keys() - {"hf_clover"} if is_file_long else ()
        for module in modules:
            changed = MODULES[module].relative_to(sets.ROOT).as_posix()
            assert sets._is_for(item(sets, file, is_file_long=True), [changed]), f"{file} imports {module}"
        seen += len(modules)
    assert seen > 50


def test_no_test_file_imports_another(sets):
    """A change in what they share would run one of them without the other."""
    files = sorted((sets.ROOT / "tests").rglob("test_*.py"))
    of_tests = {file.stem for file in files}
    assert len(of_tests) > 80
    for file in files:
        nodes = [*ast.walk(ast.parse(file.read_text()))]
        names = [alias.name for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
        names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
        assert of_tests.isdisjoint(part for name in names for part in name.split(".")), file.name


def test_the_tests_that_ci_names_exist(sets):
    """They run with the oldest versions, where pytest would notice a wrong name only after many minutes."""
    named = re.findall(r"(tests/\S+\.py)::(\w+)", (sets.ROOT / ".ci" / "run").read_text())
    assert len(named) >= 2
    for file, test in named:
        assert f"def {test}(" in (sets.ROOT / file).read_text()
