"""Which versions of torch and transformers the package is for.

Contract: `check_versions` looks at what is installed before it is imported. A version that is too old raises an error
that names it, and not one about some missing name. A version newer than all that were tried gives one warning, and
the import continues: the hook checks every name that it needs, and a target is tried before its first tree. Floors
and caps are those of setup.cfg; a test compares them.
"""

import re
import warnings
from importlib.metadata import PackageNotFoundError, version

# Package -> the first version that works, and the first that nobody has tried.
SUPPORTED = {"torch": ("2.6", "3"), "transformers": ("5.17", "5.25")}


def check_versions() -> None:
    for package, (oldest, untried) in SUPPORTED.items():
        found = installed_version(package)
        if found is None or re.match(r"\d+\.\d+", found) is None:
            continue  # its own import says what is missing
        if _release(found) < _release(oldest):
            raise ImportError(
                f"hf_clover needs {package} {oldest} or later, and {package} {found} is installed: "
                f"`pip install --upgrade {wanted(package)}`."
            )
        if _release(found) >= _release(untried):
            warnings.warn(
                f"hf_clover has not been tried with {package} {untried} or later, and {package} {found} is installed. "
                f"`hf-clover env` tries whether drafts are accepted. If something breaks, `pip install "
                f"{wanted(package)}`, or look for a newer hf_clover.",
                UserWarning,
                stacklevel=3,
            )


def wanted(package: str) -> str:
    """The supported versions as pip's quoted argument."""
    oldest, untried = SUPPORTED[package]
    return f'"{package}>={oldest},<{untried}"'


def installed_version(package: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _release(text: str) -> tuple[int, int]:
    """Major and minor version: "2.13.0+cpu" is (2, 13), "3" is (3, 0)."""
    major, minor = re.findall(r"^(\d+)(?:\.(\d+))?", text)[0]
    return int(major), int(minor or 0)
