"""The documentation site, without mkdocs: its pages are in the navigation, near the front page, and need no network."""

import posixpath
import re

import yaml
from support import ROOT


class _Loader(yaml.SafeLoader):
    """Of mkdocs.yml, whose tags name Python functions."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
SETTINGS = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _Loader)
HOME = ROOT / "README.md"


def pages_of(nav):
    for item in nav:
        value = next(iter(item.values())) if isinstance(item, dict) else item
        yield from [value] if isinstance(value, str) else pages_of(value)


NAV = list(pages_of(SETTINGS["nav"]))


def source_of(path):
    """The file of a page of the navigation. Those from outside docs/ keep their path, but for the front page."""
    if path == "index.md":
        return HOME
    if path.startswith("notebooks/"):
        return ROOT / path.replace(".md", ".ipynb")
    return (
        ROOT / path
        if path.startswith("recipes/") or path in ("CONTRIBUTING.md", "CHANGELOG.md")
        else ROOT / "docs" / path
    )


def links_of(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s#:]+)", text):
        target = ROOT / posixpath.normpath(posixpath.join(page.relative_to(ROOT).parent.as_posix(), link))
        if target.suffix in (".md", ".ipynb"):
            yield target


def test_every_page_is_in_the_navigation_once():
    assert len(NAV) == len(set(NAV))
    sources = {source_of(path) for path in NAV}
    pages = {*ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/**/*.md"), *ROOT.glob("notebooks/*.ipynb")}
    pages.add(ROOT / "CONTRIBUTING.md")
    assert sources >= pages
    assert all(source.exists() for source in sources)


def test_every_page_is_three_clicks_from_the_front_page():
    """By the links of the pages themselves; the navigation is in a menu that small screens fold away."""
    clicks, reached = 0, {HOME}
    near = {HOME}
    while near and clicks < 3:
        near = {link for page in near for link in links_of(page)} - reached
        reached |= near
        clicks += 1
    assert {source_of(path) for path in NAV} <= reached


def test_the_site_needs_no_network():
    assert SETTINGS["theme"]["font"] is False
    assert not any("://" in script for script in SETTINGS["extra"]["polyfills"])
    assert SETTINGS["use_directory_urls"] is False  # pages open from the disk
    assert "offline" in SETTINGS["plugins"]
    assert SETTINGS["strict"] is True
