"""What the site is made of: the repository's own pages where they lie, and docstrings in the form of transformers."""

import re
import subprocess
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify

PAGES = re.compile(r"(README|CONTRIBUTING|CHANGELOG)\.md|(docs|examples)/.+\.md")
LINKED = re.compile(
    r"LICENSE|CITATION\.bib|constraints.*\.txt|setup\.cfg|examples/.+\.(png|svg|json|py|ya?ml|jsonl\.gz)"
)


def on_config(config: MkDocsConfig) -> None:
    """Headings have the anchors that GitHub gives them."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """In place of docs/ alone: pages, and the files that they show or link, by their paths in the repository."""
    root = Path(config.config_file_path).parent
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.splitlines()
    chosen = [path for path in listed if (PAGES.fullmatch(path) or LINKED.fullmatch(path)) and (root / path).exists()]
    of_theme = [file for file in files if file.src_dir != config.docs_dir]
    ours = [File(path, str(root), config.site_dir, config.use_directory_urls) for path in sorted(chosen)]
    return Files([*of_theme, *ours])


class HuggingFaceForm(griffe.Extension):
    """Types stand in backticks and stars there, "(`int`, *optional*)", and names of classes in brackets. A default
    that the signature shows is not said again."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring is None:
            return
        shown = {one.name for one in obj.parameters} if obj.is_function or obj.is_class else set()

        def plain(line: re.Match) -> str:
            type_ = re.sub("[`*]", "", line["type"])
            return f"{line['name']} ({re.sub(', optional.*', '', type_) if line['name'].strip() in shown else type_}):"

        text = re.sub(r"\[(`)~?([\w.]+`)\]", r"\1\2", obj.docstring.value)
        text = re.sub(r"(?m)^(?P<name> +\w+) \((?P<type>.+)\):$", plain, text)
        obj.docstring.value = re.sub(r"(?m)^(Returns:\n +)`(.+?)`", r"\1\2", text)
