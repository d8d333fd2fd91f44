"""How to install hf_freeze, which is on no package index yet: the one place that says it."""

from importlib.util import find_spec


class MissingExtra(ImportError):
    """A package of an extra is not installed."""


def how_to_install(extra: str = "") -> str:
    """A few words for messages and cards. `extra`: a set of optional dependencies, such as `"export"`."""
    target = f'".[{extra}]"' if extra else "."
    return f"from a clone: pip install -c constraints.txt -e {target}"


def require(extra: str, what: str, *packages: str) -> None:
    """Raise MissingExtra unless these packages of `extra`, which `what` needs, are installed."""
    for package in packages:
        if find_spec(package) is None:
            raise MissingExtra(f"{what} needs the package {package}, which is missing; {how_to_install(extra)}")
