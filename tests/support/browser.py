"""Headless Chromium for tests of pages."""

import contextlib
import functools
import http.server
import json
import queue
import shutil
import subprocess
import threading

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


class _Receiver(http.server.SimpleHTTPRequestHandler):
    """Serves a folder; what a page posts goes to `posted` of the server. `headers` of the server are sent with each answer."""

    def end_headers(self):
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        super().end_headers()

    def do_POST(self):
        self.server.posted.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def served(folder, **headers):
    """A web server for a folder, on this machine alone. `headers`: with _ for -"""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Receiver, directory=folder)) as server:
        server.posted, server.headers = (
            queue.Queue(),
            {name.replace("_", "-"): value for name, value in headers.items()},
        )
        threading.Thread(target=server.serve_forever, daemon=True).start()
        server.address = f"http://127.0.0.1:{server.server_port}"
        yield server
        server.shutdown()


def posted_by(server, page, profile):
    """What the script of a page posts to its server, as JSON. `profile`: an empty folder."""
    command = [CHROMIUM, *OPTIONS, f"--user-data-dir={profile}", f"{server.address}/{page}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as browser:
        try:
            return server.posted.get(timeout=240)
        finally:
            browser.terminate()
