"""The README says what the code does."""

import os
import re
import subprocess
import sys

import pytest
from support import ROOT

from hf_freeze.cli.methods import methods_by_architectures

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("recipes/**/*.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_table_of_methods_is_the_registries():
    assert methods_by_architectures() in README


def test_the_python_example_prints_what_it_says():
    example = re.search(r"```python\n(import torch\n.*?)```", README, re.DOTALL)
    promised = re.search(r"This prints `(.+?)`", README)
    assert example
    assert promised
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", example[1]], capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == promised[1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert link.startswith("http") or (page.parent / link).exists(), link


def test_the_commands_of_the_readme_exist():
    targets = re.findall(r"^make (\w+)", README, re.MULTILINE)
    assert targets
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for recipe in re.findall(r"recipes/\S+?\.yaml", README):
        assert (ROOT / recipe).exists(), recipe
