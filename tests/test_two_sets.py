"""Which tests of the long set run: those about files that have changed. And what the two sets name is there."""

import ast
import re
import subprocess
from types import SimpleNamespace

import pytest


@pytest.fixture
def sets(request):
    """The module that chooses: tests/conftest.py."""
    return request.config.pluginmanager.get_plugin(str(request.config.rootpath / "tests" / "conftest.py"))


def item(sets, path, *about, is_long=True):
    """A test as pytest collects it, in a file of that path."""
    marks = [SimpleNamespace(args=about)] if is_long else []
    return SimpleNamespace(path=sets.ROOT / path, iter_markers=lambda name: iter(marks))


@pytest.mark.parametrize(
    ("changed", "runs"),
    [
        ([], False),
        (["hf_clover/hub/push.py"], True),
        (["hub_cards/heads.md"], True),
        (["hf_clover/hub_of_another.py", "hf_clover/decoding/walk.py", "hub_cards.md"], False),
        (["README.md", "tests/test_serving.py"], True),
        (["tests/helpers/tiny_text.py"], True),
        (["tests/helpers/zoo.py"], False),
        (["constraints.txt"], True),
        (["tests/conftest.py"], True),
    ],
)
def test_a_test_of_the_long_set_runs_where_what_it_is_about_has_changed(sets, changed, runs):
    """Its own file, helpers that it imports, and what concerns all tests count too."""
    assert sets._is_for(item(sets, "tests/test_serving.py", "hf_clover/hub", "hub_cards"), changed) is runs
    assert sets._is_for(item(sets, "tests/test_serving.py", is_long=False), changed)


def test_new_figures_are_for_the_tests_that_read_them(sets):
    """Not for those of the scripts that made them."""
    about_all, about_one = ("examples/experiments",), ("examples/smollm2", f"{sets.FIGURES}smollm2.json")
    changed = [f"{sets.FIGURES}smollm2.json", f"{sets.FIGURES}smollm2.md"]
    assert not sets._is_for(item(sets, "tests/test_experiments.py", *about_all), changed)
    assert sets._is_for(item(sets, "tests/test_experiments.py", *about_all), ["examples/experiments/step_costs.py"])
    assert sets._is_for(item(sets, "tests/test_smollm2.py", *about_one), changed)
    assert not sets._is_for(item(sets, "tests/test_smollm2.py", *about_one), changed[1:])


def test_what_was_moved_has_changed_in_both_places(sets, tmp_path, monkeypatch):
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


def test_every_path_that_a_mark_names_is_there(sets):
    """A mark with a path that was moved would never be run for a change."""
    named = 0
    for file in (sets.ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.long":
                paths = [ast.literal_eval(argument) for argument in node.args]  # written out: none is left unread
                named += len(paths)
                assert paths, f"{file.name}: a long test says what it is about"
                assert [path for path in paths if not (sets.ROOT / path).exists()] == [], file.name
    assert named > 50


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


def test_the_tests_that_ci_names_are_there(sets):
    """Those for the oldest versions, where pytest would say so after many minutes."""
    named = re.findall(r"(tests/\S+\.py)::(\w+)", (sets.ROOT / ".ci" / "run").read_text())
    assert len(named) >= 2
    for file, test in named:
        assert f"def {test}(" in (sets.ROOT / file).read_text()
