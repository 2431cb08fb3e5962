"""Which versions of torch and transformers the package is for.

Contract: `check_versions` looks at what is installed, without importing it, so that `import hf_clover` stays light.
A version too old is refused at import; a major version newer than any that was tested is warned of, and the hook then
checks what it relies on by name. The floors are those of setup.cfg, and a test compares the two.
"""

import re
import warnings
from importlib.metadata import PackageNotFoundError, version

# Package: the first version that will do, and the first major version that nobody has tried.
SUPPORTED = {"torch": ("2.6", 3), "transformers": ("5.17", 6)}


def check_versions() -> None:
    for package, (oldest, untried) in SUPPORTED.items():
        found = installed_version(package)
        if found is None or re.match(r"\d+\.\d+", found) is None:
            continue  # its own import says what is missing
        wanted = f'"{package}>={oldest},<{untried}"'
        if _release(found) < _release(oldest):
            raise ImportError(
                f"hf_clover needs {package} {oldest} or later, and {package} {found} is installed: "
                f"`pip install --upgrade {wanted}`."
            )
        if _release(found)[0] >= untried:
            warnings.warn(
                f"hf_clover has not been tried with {package} {untried} or later, and {package} {found} is installed. "
                f"If something breaks, `pip install {wanted}`, or look for a newer hf_clover.",
                UserWarning,
                stacklevel=3,
            )


def installed_version(package: str) -> str | None:
    """None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _release(text: str) -> tuple[int, int]:
    """Major and minor version: "2.13.0+cpu" is (2, 13)."""
    major, minor = re.findall(r"^(\d+)\.(\d+)", text)[0]
    return int(major), int(minor)
