"""The script that breaks lines on purpose: what it calls killed, and that it notices a survivor.

All fourteen lines are tried by CI, with `python tests/mutations.py`.
"""

import dataclasses
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import mutations
import pytest
from mutations import MUTATIONS, Mutation

LEVELS = next(mutation for mutation in MUTATIONS if "budget by levels" in mutation.name)


def test_the_list_breaks_fourteen_lines_of_five_files_once_each(tmp_path):
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) == 14
    files = Counter(mutation.file for mutation in MUTATIONS)
    assert set(files) == {
        f"decoding/{module}.py" for module in ("walk", "call", "tree", "cache/by_row", "cache/static")
    }
    assert min(files.values()) > 1
    for number, mutation in enumerate(MUTATIONS):
        folder = tmp_path / str(number)
        mutations.broken_copy(mutation, folder)
        before = (mutations.ROOT / "hf_clover" / mutation.file).read_text().splitlines()
        after = (folder / "hf_clover" / mutation.file).read_text().splitlines()
        differing = [(old.strip(), new.strip()) for old, new in zip(before, after, strict=True) if old != new]
        assert differing == [(mutation.line, mutation.broken)]
        for test in mutation.tests:
            file, _, function = test.partition("::")
            assert f"def {function.partition('[')[0]}(" in (Path(__file__).parent / file).read_text()


@pytest.mark.parametrize("line", ["no such line", "if layer.is_initialized:", ""])
def test_a_line_that_does_not_stand_exactly_once_is_refused(line, tmp_path):
    absent = dataclasses.replace(MUTATIONS[-1], line=line)
    with pytest.raises(ValueError, match=r"stands \d+ times in decoding/cache/by_row.py: mend mutations.py"):
        mutations.broken_copy(absent, tmp_path)


# A list of the script's own, in a process that has not imported the package: one line that tests notice, one that
# changes nothing, one whose copy cannot be imported, one whose tests are not there.
CASES = """
import sys
sys.path.insert(0, {tests!r})
import mutations
from mutations import Mutation
levels = mutations.MUTATIONS[{number}]
mutations.MUTATIONS = (
    levels,
    Mutation("same", levels.file, levels.line, levels.line + "  # nothing", levels.tests),
    Mutation("broken", levels.file, levels.line, "(", levels.tests),
    Mutation("untested", levels.file, levels.line, levels.broken, ("test_tree.py::test_no_such_thing",)),
)
sys.exit(mutations.main([]))
"""


@pytest.mark.long("tests/mutations.py")
def test_a_survivor_is_noticed_and_the_script_fails():
    script = CASES.format(tests=str(Path(__file__).parent), number=MUTATIONS.index(LEVELS))
    # Without what measures coverage: a broken copy is no part of the package.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("COV", "PYTEST_"))}
    command = [sys.executable, "-c", script]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    said = [line for line in process.stdout.splitlines() if line.startswith(("killed", "SURVIVED", "could not"))]
    assert process.returncode == 1, process.stderr
    assert [line.split()[0] for line in said] == ["killed:", "SURVIVED", "could", "could"], process.stdout
    assert said[1].startswith("SURVIVED test_tree.py::test_levels_stop_when_the_budget_is_used_up: same")
    assert "(exit code 99): Traceback" in said[2]
    assert "(exit code 4)" in said[3]
    assert process.stdout.splitlines()[-1] == "1 of 4 broken lines were noticed"


def test_an_unknown_name_makes_the_script_fail():
    assert mutations.main(["no such mutation"]) == 1
    assert isinstance(MUTATIONS[0], Mutation)
