"""How to install hf_freeze, which is on no package index yet: the one place that says it."""


def how_to_install(extra: str = "") -> str:
    """A few words for messages and cards. `extra`: a set of optional dependencies, such as `"export"`."""
    target = f'".[{extra}]"' if extra else "."
    return f"from a clone: pip install -c constraints.txt -e {target}"
