"""Checks the language of pages, help texts and error messages: `python docs/tooling/language/check.py [PATH ...]`.

Without paths it checks all public texts. `rules.yaml` beside it lists the words and phrases that we do not write, with what to
write instead, and the longest sentence of each page. `--front-door README.md` also checks the limits of a front door: its words
and its reading grade.

How it counts: code blocks, HTML and images do not count. A name in code is one word, and a word of one syllable for the reading
grade. Cells of tables, headings and items of lists are texts of their own, and their words count. The reading grade is textstat's
Flesch-Kincaid grade of paragraphs and items of lists.
"""

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import yaml
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[3]
RULES = yaml.safe_load((Path(__file__).parent / "rules.yaml").read_text(encoding="utf-8"))
WORDS = [(re.compile(rule["pattern"], re.IGNORECASE), rule) for rule in RULES["words"]]
ABBREVIATION = re.compile(r"\b(al|cf|vs|No|Fig|Sec)\.(?=\s)")
# Also between the entries of a report's list of rows, and before the mark that a sentence explains
BETWEEN_SENTENCES = re.compile(r"(?<=[.!?…])[)\"'”’]*\s+(?=[\"'“(\[]?[A-Z0-9✓✗*])|; (?=row \w)")
CODE = "Name"  # stands for a name in code. Capital, since it may begin a sentence


@dataclass(frozen=True)
class Text:
    """A paragraph, heading, cell or literal. `line` counts from 1."""

    line: int
    words: str
    kind: str

    @property
    def sentences(self) -> list[str]:
        return BETWEEN_SENTENCES.split(ABBREVIATION.sub(r"\1", self.words))


def count_words(text: str) -> int:
    return sum(any(character.isalnum() for character in word) for word in text.split())


def texts_of_page(markdown: str) -> Iterator[Text]:
    kinds = {"heading_open": "heading", "th_open": "cell", "td_open": "cell"}
    shown = {"softbreak": " ", "hardbreak": " ", "code_inline": CODE}
    opened, line = "", 1
    for token in MarkdownIt("commonmark").enable("table").parse(markdown):
        line = token.map[0] + 1 if token.map else line
        if token.type == "inline":
            parts = [
                child.content if child.type == "text" else shown.get(child.type, "") for child in token.children or ()
            ]
            yield Text(line, "".join(parts), kinds.get(opened, "paragraph"))
        opened = token.type


def texts_of_notebook(content: str) -> Iterator[Text]:
    """Of its cells of text. Lines count as if these were one page."""
    cells = [cell for cell in json.loads(content)["cells"] if cell["cell_type"] == "markdown"]
    return texts_of_page("\n\n".join("".join(cell["source"]) for cell in cells))


def texts_of_module(python: str) -> Iterator[Text]:
    """The string literals of several words: help, errors, labels, docstrings. A field of an f-string is a name in code."""
    tree = ast.parse(python)
    fields = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    parts = {id(part) for node in fields for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            words = "".join(str(part.value) if isinstance(part, ast.Constant) else CODE for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            words = node.value
        else:
            continue
        words = " ".join(re.sub(r"`[^`]*`", CODE, words).split())
        if " " in words:
            yield Text(node.lineno, words, "literal")


def faults_of(page: str, texts: list[Text]) -> Iterator[str]:
    """One line for each fault, with its place."""
    limit = next(limit for pattern, limit in RULES["longest sentence"].items() if fnmatch(page, pattern))
    for text in texts:
        for pattern, rule in WORDS:
            if rule.get("kind", text.kind) == text.kind and (match := pattern.search(text.words)):
                yield f"{page}:{text.line}: {match[0]!r}: {rule['instead']}"
        if text.kind in ("paragraph", "heading"):
            yield from long_sentences(page, text, limit)


def long_sentences(page: str, text: Text, limit: int) -> Iterator[str]:
    for sentence in text.sentences:
        if (count := count_words(sentence)) > limit:
            yield f"{page}:{text.line}: {count} words in a sentence, at most {limit}: {' '.join(sentence.split()[:8])} …"


def front_door_faults(page: str, texts: list[Text]) -> Iterator[str]:
    import textstat  # here, so that words and sentences are checked without it

    limits = RULES["front door"]
    if (count := sum(count_words(text.words) for text in texts)) > limits["words"]:
        yield f"{page}: {count} words, at most {limits['words']}"
    prose = "\n".join(text.words.rstrip(".:") + "." for text in texts if text.kind == "paragraph")
    if (grade := textstat.flesch_kincaid_grade(prose)) > limits["grade"]:
        yield f"{page}: Flesch-Kincaid grade {grade:.1f}, at most {limits['grade']}"
    for text in texts:
        yield from long_sentences(page, text, limits["sentence"])


def public_texts() -> list[Path]:
    excluded = {path for pattern in RULES["not checked"] for path in ROOT.glob(pattern)}
    return [path for pattern in RULES["pages"] for path in sorted(ROOT.glob(pattern)) if path not in excluded]


def check(path: Path, front_door: bool = False) -> list[str]:
    """The faults of a page or module."""
    page = str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)
    content = path.read_text(encoding="utf-8")
    texts = list({".py": texts_of_module, ".ipynb": texts_of_notebook}.get(path.suffix, texts_of_page)(content))
    return [*faults_of(page, texts), *(front_door_faults(page, texts) if front_door else ())]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(": ")[0] + ".")
    parser.add_argument("paths", nargs="*", type=Path, help="pages and modules; without any, all public texts")
    parser.add_argument("--front-door", type=Path, metavar="PAGE", help="check this page as a front door too")
    options = parser.parse_args(arguments)
    paths = options.paths or ([] if options.front_door else public_texts())
    faults = [fault for path in paths for fault in check(path.resolve())]
    if options.front_door:
        faults += check(options.front_door.resolve(), front_door=True)
    print("\n".join(dict.fromkeys(faults)) or "no faults of language")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
