"""The site without building it: what it leads through is there, and no page of docs/ is left out."""

import yaml
from helpers.pages import ROOT

SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def paths(entries) -> list[str]:
    """The pages of the navigation, in its order."""
    if isinstance(entries, str):
        return [entries]
    values = entries.values() if isinstance(entries, dict) else entries
    return [path for entry in values for path in paths(entry)]


def test_the_navigation_leads_to_every_page_of_docs():
    named = paths(SITE["nav"])
    assert len(named) == len({*named})
    assert [path for path in named if not (ROOT / path).is_file()] == []
    assert {page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").glob("*.md")} <= {*named}
    assert named[0] == "README.md"


def test_hooks_and_watched_files_of_the_site_exist():
    hooks = [*SITE["hooks"], *(path.partition(":")[0] for path in griffe_extensions())]
    assert [path for path in hooks if not (ROOT / path).is_file()] == []
    assert [path for path in SITE["watch"] if not (ROOT / path).exists()] == []


def griffe_extensions() -> list[str]:
    (mkdocstrings,) = [plugin["mkdocstrings"] for plugin in SITE["plugins"] if isinstance(plugin, dict)]
    return mkdocstrings["handlers"]["python"]["options"]["extensions"]
