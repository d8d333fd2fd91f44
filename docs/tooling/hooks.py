"""What mkdocs does beyond its settings: pages from outside docs/, links as GitHub reads them, and search without a network."""

import functools
import posixpath
import re
from pathlib import Path
from typing import Any

import results
from mkdocs.structure.files import File, Files

import notebooks

ROOT = Path(__file__).parents[2]
# What the site shows from outside docs/. On the site these files keep their path, and those of docs/ lose the first folder.
OUTSIDE = ("CONTRIBUTING.md", "CHANGELOG.md", "CITATION.cff", "recipes/**/*.md", "recipes/**/*.yaml", "recipes/**/*.py")
REPORTS = "docs/results/*.html"  # those that no archive gives; the others are made for the site
MADE = ROOT / "build" / "reports"
ARCHIVE = re.compile(rf"\[[^\]]*\]\((\w+){re.escape(results.ENDING)}\)")
NOTEBOOKS = "notebooks/*.ipynb"  # pages with the outputs that the files hold
HOME = "index.md"  # of the site is README.md
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside docs/, and the reports, whose names are those of pages: `a.md` becomes `a.html` too. The report
    of each archive is made."""
    for report in _reports():
        files.append(File.generated(config, f"results/{report.stem}_report.html", abs_src_path=str(report)))
    for pattern in ("README.md", *OUTSIDE, REPORTS):
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, site_path(path.relative_to(ROOT).as_posix()), abs_src_path=str(path)))
    for path in sorted(ROOT.glob(NOTEBOOKS)):
        page = site_path(path.relative_to(ROOT).as_posix())
        files.append(File.generated(config, page, content=notebooks.page_of(path)))
    return files


@functools.cache  # `mkdocs serve` calls for each change
def _reports() -> list[Path]:
    results.write_html(MADE)
    return [MADE / f"{name}.html" for name in results.archives()]


def site_path(path: str) -> str:
    """The place on the site of a file of the repository."""
    if path == "README.md":
        return HOME
    if Path(path).match(REPORTS):
        path = path.replace(".html", "_report.html")
    if Path(path).match(NOTEBOOKS):
        path = path.replace(".ipynb", ".md")
    return path.removeprefix("docs/")


def repository_path(src_uri: str) -> str:
    """The place in the repository of a file of the site."""
    if src_uri == HOME:
        return "README.md"
    if src_uri.startswith("notebooks/"):
        return src_uri.replace(".md", ".ipynb")
    return src_uri if any(Path(src_uri).match(pattern) for pattern in OUTSIDE) else f"docs/{src_uri}"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links are written for GitHub, where docs/ is a folder like others: lead them to where the files are on the site."""
    markdown = markdown.replace("']['", "']\\['")  # of Python, in messages of families.md: no reference
    here = repository_path(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        opening, link, anchor, closing = match.groups()
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), link))
        new = posixpath.relpath(site_path(target), posixpath.dirname(page.file.src_uri) or ".")
        return f"{opening}{new}{anchor or ''}{closing}"

    pieces = re.split(f"({CODE.pattern})", markdown, flags=CODE.flags)
    text = "".join(piece if number % 2 else LINK.sub(moved, piece) for number, piece in enumerate(pieces))
    return ARCHIVE.sub(r"[page](\1_report.html), \g<0>", text) if here.startswith("docs/results/") else text


def on_post_page(output: str, **_: Any) -> str:
    """Name the dialog and the box of the search, which the theme leaves to those who see them."""
    output = output.replace('role="dialog"', 'role="dialog" aria-label="Search"')
    return output.replace('data-md-toggle="search"', 'data-md-toggle="search" aria-label="Search"')


on_post_template = on_post_page  # of 404.html
