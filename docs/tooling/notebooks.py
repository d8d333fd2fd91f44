"""Executes the notebooks and keeps their outputs: `make notebooks`, or `python docs/tooling/notebooks.py NAME ...` for some.

They run in an empty folder, so that nothing is resumed. What differs between machines and times is removed, so that a diff shows
what has changed in the results. `page_of` makes a page of the site from one.

`sentence_encoder_of_11_mb.ipynb` keeps the outputs of all-MiniLM-L6-v2 and the captions of Multi30k: set CAPTIONS, and MODEL
without a network, before it is executed here. Without CAPTIONS, it runs on stand-ins, whose outputs a test refuses.
"""

import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "notebooks"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
PATH = re.compile(r"(?<![\w.:/<*])/\w[\w.-]*/[\w./-]*|\b[A-Z]:\\[\w.\\-]*")  # an absolute path, of any system


def execute(path: Path) -> None:
    """Run all cells of the notebook and write their outputs into it. Raises CellExecutionError for a cell that fails, after which
    the file is as it was, and ValueError for an output that tells where this machine keeps its files."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        options = {"timeout": None, "record_timing": False, "coalesce_streams": True}
        NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": folder}}, **options).execute()
    clean(notebook)
    if found := faults(notebook):
        raise ValueError(f"{path.name}: {'; '.join(found)}")
    nbformat.write(notebook, path)


def clean(notebook: Any) -> None:
    """Remove what the next execution would change without a change of the results."""
    notebook["metadata"] = METADATA
    for cell in notebook["cells"]:
        cell["metadata"] = {}
        for output in cell.get("outputs", []):
            if "metadata" in output:
                output["metadata"] = {}


def faults(notebook: Any) -> list[str]:
    """What a notebook in the repository must not have, in words."""
    found = []
    for number, cell in enumerate(notebook["cells"], start=1):
        for output in cell.get("outputs", []):
            kind = output.get("name", output["output_type"])
            if kind in ("error", "stderr"):
                found.append(f"cell {number} has an output of kind {kind}: {''.join(output.get('text', ''))[:200]!r}")
        texts = ["".join(cell["source"]), *(text for output in cell.get("outputs", []) for text in _texts(output))]
        found += [f"cell {number} has the path of a machine, {path}" for text in texts for path in PATH.findall(text)]
    return found


def _texts(output: Any) -> list[str]:
    """What an output says: not its pictures, whose letters may spell anything."""
    data = [value for kind, value in output.get("data", {}).items() if not kind.startswith("image/")]
    return ["".join(text) for text in [output.get("text", ""), *data, *output.get("traceback", [])]]


def page_of(path: Path) -> str:
    """The notebook in Markdown, with its outputs."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(part for cell in cells for part in _parts(cell)) + "\n"


def _parts(cell: Any) -> list[str]:
    source = "".join(cell["source"])
    return [source] if cell["cell_type"] == "markdown" else [_fenced(source, "python"), *map(_shown, cell["outputs"])]


def _shown(output: Any) -> str:
    data = {kind: "".join(value) for kind, value in output.get("data", {}).items()}
    if "image/png" in data:
        return (
            f'<img alt="The figure that the code above draws" src="data:image/png;base64,{data["image/png"].strip()}">'
        )
    return data.get("text/markdown") or _fenced("".join(output.get("text", "")) or data.get("text/plain", ""), "text")


def _fenced(text: str, language: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"


if __name__ == "__main__":
    for chosen in sys.argv[1:] or sorted(path.name for path in FOLDER.glob("*.ipynb")):
        began = time.monotonic()
        execute(FOLDER / chosen)
        print(f"{chosen}: {time.monotonic() - began:.0f} s", flush=True)
