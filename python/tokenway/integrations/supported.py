"""Which versions of a framework an integration is for."""

from __future__ import annotations

import re
from importlib import metadata

from tokenway import Unsupported

LEAST_TORCH = "2.7"  # that all integrations are for


def check_framework(package: str, least: str, below: str, extra: str | None = None) -> None:
    """Raises Unsupported, as `check`, unless PyTorch and a framework are there in versions that its integration is for.
    extra: None: named as the package."""
    extra = extra or package
    check("torch", LEAST_TORCH, None, extra)
    check(package, least, below, extra)


def missing(package: str, least: str, below: str, extra: str | None = None) -> str | None:
    """Why there is no such framework here, as `check_framework` says it, or None."""
    try:
        check_framework(package, least, below, extra)
    except Unsupported as problem:
        return str(problem)
    return None


def check(package: str, least: str, below: str | None, extra: str) -> None:
    """Raises Unsupported, which names the range, unless a version of `package` from `least` on, and before `below`, is
    installed. extra: of this package, which brings it. Imports nothing."""
    wanted = f"{package} from {least} on" + (f", before {below}" if below else "")
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise Unsupported(f"{package} is not installed; needed is {wanted}: pip install 'tokenway[{extra}]'") from None
    number = _number(found)
    if number < _number(least) or (below is not None and number >= _number(below)):
        raise Unsupported(f"{package} {found} is installed; needed is {wanted}: pip install 'tokenway[{extra}]'")


def _number(version: str) -> tuple[int, ...]:
    """Of what stands before a pre-release, or a local version."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
