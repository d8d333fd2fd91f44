"""What the tests share. Pytest finds it as `support` (`pythonpath` in pyproject.toml)."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
