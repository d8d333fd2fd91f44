"""Tables and text in Markdown."""

import re
from collections.abc import Sequence


def markdown_table(headings: Sequence[str], cells: Sequence[Sequence[str]], left: int) -> list[str]:
    """Lines of a table, whose first `left` columns are texts and the others numbers."""
    lines = ["| " + " | ".join(headings) + " |", "|" + " --- |" * left + " ---: |" * (len(headings) - left)]
    return lines + ["| " + " | ".join(map(escape, row)) + " |" for row in cells]


def escape(text: str) -> str:
    """What a label holds is text, and no Markdown table or HTML."""
    return re.sub(r"<(?=[a-zA-Z/!?])", "&lt;", " ".join(text.split()).replace("|", "\\|"))
