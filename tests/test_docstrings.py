"""Docstrings of public names: a line for each parameter, what comes back, and an example that runs.

Public is what `docs/api.md` shows: all that `hf_clover` and `hf_clover.training` export, what other pages import, and
the methods that a user calls. Examples run where those of the pages do: `org/target` and the like are tiny models.
"""

import dataclasses
import doctest
import inspect
import pydoc
import re
from collections.abc import Iterator

import pytest
from helpers.pages import DOCS, ROOT, blocks, elsewhere, models  # noqa: F401  (two of them are fixtures)

import hf_clover
from hf_clover import training

NAMES = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
WITH_EXAMPLES = [name for name in NAMES if "```python" in (inspect.getdoc(pydoc.locate(name)) or "")]


def described(docstring: str) -> set[str]:
    """The parameters in the section `Args:`."""
    section = re.search(r"^Args:\n((?:    .*\n|\n)*)", docstring + "\n", re.MULTILINE)
    return set(re.findall(r"^    (\w+)(?: \(.+\))?:$", section[1], re.MULTILINE)) if section else set()


def parameters(thing) -> set[str]:
    """All of them, or of a dataclass the fields that it adds or changes."""
    if dataclasses.is_dataclass(thing):
        ours = (base for base in thing.__mro__ if base.__module__.startswith("hf_clover"))
        annotated = {name for base in ours for name in inspect.get_annotations(base)}
        return {field.name for field in dataclasses.fields(thing)} & annotated
    known = inspect.signature(thing).parameters.values()
    return {one.name for one in known if one.name != "self" and one.kind is not one.VAR_POSITIONAL}


def test_every_public_name_is_on_the_api_page():
    exported = {f"hf_clover.{name}" for name in hf_clover.__all__ if name != "__version__"}
    exported |= {f"hf_clover.training.{name}" for name in training.__all__ if name not in hf_clover.__all__}
    code = "\n".join(code for page in DOCS for _, code in blocks(page, "python"))
    imported = {
        f"{module}.{name}"
        for module, names in re.findall(r"^ *from (hf_clover[\w.]*) import (.+)$", code, re.MULTILINE)
        for name in names.split(", ")
    }
    assert exported | imported <= {*NAMES}
    assert len(NAMES) == len({*NAMES})


@pytest.mark.parametrize("name", NAMES)
def test_docstrings_describe_every_parameter_and_the_result(name):
    thing = pydoc.locate(name)
    docstring = inspect.getdoc(thing)
    if docstring.startswith("As `"):  # what it overrides is described there
        return
    assert described(docstring) == parameters(thing)
    if not inspect.isclass(thing):
        gives = inspect.signature(thing).return_annotation not in (None, Iterator[None])
        assert ("\nReturns:\n" in docstring) == gives
    if name.count(".") == 1:
        assert name in WITH_EXAMPLES


class LastLines(doctest.OutputChecker):
    """What an example gives; a trainer may show what it logs before that."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return super().check_output(want, got, optionflags) or (want != "" and got.endswith(f"\n{want}"))


@pytest.mark.long(
    "docs/api.md",
    "hf_clover/network",
    "hf_clover/training",
    "hf_clover/measure/losslessness.py",
    "hf_clover/decoding/cache/by_row.py",
    "hf_clover/decoding/draft/copies.py",
    "hf_clover/decoding/draft/drafter.py",
    "hf_clover/decoding/hook.py",
    "hf_clover/decoding/record.py",
)
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_in_docstrings_run(name):
    docstring = re.sub(r"^ *```.*$", "", inspect.getdoc(pydoc.locate(name)), flags=re.MULTILINE)
    example = doctest.DocTestParser().get_doctest(docstring, {}, name, None, 0)
    assert example.examples
    said: list[str] = []
    doctest.DocTestRunner(LastLines()).run(example, out=said.append)
    assert not said, "".join(said)
