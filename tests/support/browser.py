"""Headless Chromium for tests of pages."""

import shutil
import subprocess

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium, chromium-browser, google-chrome or chrome is installed here"
)
OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
]


def dump_page(address, profile, *options):
    """The page at `address` after its scripts ran, as HTML, and what Chromium wrote to its log. `profile`: an empty folder."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *OPTIONS, f"--user-data-dir={profile}", *options, "--dump-dom", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    return done.stdout, done.stderr
