"""`python -m hf_freeze ...` in a process that has imported already."""

import sys

from hf_freeze.cli import app

if __name__ == "__main__":
    app(sys.argv[1:])
