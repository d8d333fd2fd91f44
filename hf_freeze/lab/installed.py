"""Imported before the packages that the laboratory needs: raises MissingExtra, in one line, where the extra `lab` is missing."""

from hf_freeze.install import require

require("lab", "the laboratory, hf_freeze.lab,", "datasets", "evaluate", "pydantic", "sklearn")
