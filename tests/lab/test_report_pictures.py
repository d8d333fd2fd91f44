"""Every picture of every kind of report page is shown by a browser, under the page's own Content-Security-Policy."""

import functools
import html
import http.server
import json
import re
import shutil
import threading

import numpy as np
import pytest
from support import ROOT
from support.browser import dump_page, needs_browser
from support.cases import ALL
from support.reports import make_runs

from hf_freeze.lab.report.build import make_reports
from hf_freeze.lab.report.page import page
from hf_freeze.lab.tasks.scoring import SCORING
from hf_freeze.run_folder import HEAD_SCORES

PUBLISHED = ROOT / "docs" / "results"
METRICS = {"test_bleu": 20.0, "test_chrf": 50.0, "test_perplexity": 9.0, "test_accuracy": 0.8}
METRICS |= {"dev_perplexity": 7.4, "dev_accuracy": 0.7, "test_f1": 0.8, "test_pearson": 0.9}
# Loads the pages one after the other in a frame of the same origin, and each of their pictures once more with the frame's own
# `Image`, which is under the policy of the page. `naturalWidth` is 0 for a picture that the browser does not show. Drawings are
# part of the page: theirs is the width of the largest of their paths, and 0 where nothing is drawn.
DRIVER = """<!doctype html><pre id="result"></pre><script>
const widthOf = (frame, address) => new Promise(done => {
  const image = new frame.contentWindow.Image();
  image.onload = image.onerror = () => done(image.naturalWidth);
  image.src = address;
});
(async () => {
  const widths = {};
  for (const page of PAGES) {
    const frame = document.createElement("iframe");
    const loaded = new Promise(done => frame.addEventListener("load", done));
    frame.src = page;
    document.body.append(frame);
    await loaded;
    const pictures = [...frame.contentDocument.querySelectorAll("img, image")];
    const addresses = pictures.map(picture => picture.src || picture.href.baseVal);
    frame.contentDocument.querySelectorAll("details").forEach(details => { details.open = true; });
    const drawings = [...frame.contentDocument.querySelectorAll("figure svg")];
    const drawn = drawings.map(svg => Math.max(0, ...[...svg.querySelectorAll("path")].map(path => path.getBBox().width)));
    widths[page] = [...drawn, ...await Promise.all(addresses.map(address => widthOf(frame, address)))];
    frame.remove();
  }
  document.getElementById("result").textContent = JSON.stringify(widths);
})();
</script>"""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def widths(tmp_path):
    """`widths(folder)`: for each page in `folder`, the width in pixels of each of its pictures, as Chromium shows it."""

    def measured(folder):
        pages = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.html"))
        (folder / "driver.html").write_text(DRIVER.replace("PAGES", json.dumps(pages)), encoding="utf-8")
        handler = functools.partial(_Quiet, directory=folder)
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            address = f"http://127.0.0.1:{server.server_port}/driver.html"
            dumped, log = dump_page(address, tmp_path / "profile", "--virtual-time-budget=60000")
            server.shutdown()
        (result,) = re.findall(r'<pre id="result">(.*?)</pre>', dumped, re.DOTALL)
        assert result, log
        return json.loads(html.unescape(result))

    return measured


def write_runs(folder, task):
    """Three rows with everything that a page may show: heads, schedules, curves, components."""
    make_runs(
        folder / "runs", task=task, seeds=(1,), changes={(row, 1): {"metrics": METRICS} for row in ("0", "2.1", "3")}
    )
    rng = np.random.default_rng(0)
    for run in (folder / "runs").glob("row-*"):
        if task not in ("translation", "language-modelling", "masked-lm"):  # which make_runs knows
            right, gold = rng.random(200) < 0.8, np.arange(200) % 3
            columns = [right, np.ones(200), 1 + gold]
            if task == "regression":
                said = gold + rng.normal(size=200)
                columns = [np.ones(200), said, said**2, said * gold, gold**2, gold]
            np.save(run / "items.npy", np.stack(columns, axis=1).astype(float))
        (run / HEAD_SCORES).write_text(json.dumps({"importance": {"encoder.0.self": [0.1, 0.9, 0.4]}}))
        settings = json.loads((run / "run.json").read_text())
        methods = [{"method": "layer_drop", "p": 0.2}, {"method": "magnitude_pruning", "sparsity": 0.5}]
        (run / "run.json").write_text(json.dumps(settings | {"methods": methods}))


def page_of(folder, *runs):
    """`report.html` alone: its pictures are part of it, and those beside it are drawn anew."""
    folder.mkdir(exist_ok=True)
    (folder / "report.html").write_text(page(make_reports(runs, lambda _: None), folder), encoding="utf-8")


# Tasks with scores from one metric that is a mean are alike.
TASKS = [*SCORING] if ALL else ["translation", "language-modelling", "regression", "image-classification"]


@needs_browser
def test_every_picture_of_every_kind_of_page_is_shown(widths, pictures, tmp_path):
    folder = tmp_path / "pages"
    runs = {task: folder / task / "runs" for task in TASKS}
    for task in TASKS:
        write_runs(folder / task, task)
    page_of(folder / "several", *(runs[task] for task in TASKS[:2]))
    alone = TASKS if ALL else TASKS[2:]
    for task in alone:
        page_of(folder / task, runs[task])
    shown = widths(folder)
    assert set(shown) == {f"{name}/report.html" for name in (*alone, "several")}
    for name, pixels in shown.items():
        assert pixels, f"{name} has no picture: nothing was tested"
        assert all(pixels), f"{name}: of its pictures {pixels.count(0)} of {len(pixels)} are not shown"


@needs_browser
def test_every_picture_of_the_published_pages_is_shown(widths, tmp_path):
    folder = tmp_path / "pages"
    folder.mkdir()
    for path in PUBLISHED.glob("*.html"):
        shutil.copy(path, folder)
    shown = widths(folder)
    broken = {name: pixels for name, pixels in shown.items() if not all(pixels)}
    assert not broken
    assert any(shown.values()), "no published page has a picture: nothing was tested"
