"""Hand-made runs to report on, and a parser of the pages."""

import json
from html.parser import HTMLParser

import numpy as np

from hf_freeze.lab.tasks.items import bleu, log_perplexity

ENVIRONMENT = {"hf_freeze": "0.1.0", "commit": "abc1234", "torch": "2.13.0", "transformers": "5.23.0"}

ENVIRONMENT |= {"python": "3.11.7", "device": "A Processor", "threads": 1, "cores": 2}

SIGNATURE = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0"

ROWS = {"0": ("✓✓✓ all trained", 0.8), "2.1": ("✓✗✓ attention random", 0.4), "3": ("✓✓✗ FFN random", 0.8)}


def translation_items(quality, rng, count=200):
    """Sentences of 10 words, each n-gram right with probability `quality`."""
    grams = np.tile([10, 9, 8, 7], (count, 1))
    return np.hstack([rng.binomial(grams, quality), grams, np.full((count, 2), 10)])


def block_items(quality, rng, count=200):
    tokens = np.full(count, 128.0)
    return np.stack([tokens * (5 - quality + 0.1 * rng.normal(size=count)), tokens], axis=1)


def make_runs(folder, *, task="translation", rows=ROWS, seeds=(1, 2, 3), changes=None, count=200):
    """A grid folder as `run_grid` leaves it. `changes` are dicts of a record, by (row, seed)."""
    rng = np.random.default_rng(sum(seeds))
    records = []
    for seed in seeds:
        for index, (row, (label, quality)) in enumerate(rows.items()):
            run = folder / f"row-{row}-seed-{seed}"
            run.mkdir(parents=True)
            if task == "translation":
                items = translation_items(quality, rng, count)
                metrics = {"test_bleu": float(bleu(items.sum(0))), "test_chrf": 50.0 + seed}
            else:
                items = block_items(quality, rng, count)
                metrics = {"test_perplexity": float(np.exp(log_perplexity(items.sum(0))))}
            np.save(run / "items.npy", items)
            trained = {"total": 600, "trainable": 600, "stored": 600}
            frozen = {"total": 400, "trainable": 400 * (index == 0), "stored": 400 - 100 * index}
            record = {
                "recipe": "tiny",
                "task": task,
                "row": row,
                "label": label,
                "seed": seed,
                "metrics": metrics | {"dev_loss": 2.0, "dev_perplexity": 7.39},
                "signatures": {"test_bleu": SIGNATURE} if task == "translation" else {},
                "epochs_trained": 2.0,
                "epochs_to_convergence": 2.0,
                "steps": 40,
                "parameters": {
                    "total": 1000,
                    "trainable": 600 + frozen["trainable"],
                    "stored": 600 + frozen["stored"],
                    "stored_bytes": 4 * (600 + frozen["stored"]),
                    "trainable_share": 0.6 + frozen["trainable"] / 1000,
                    "by_component": {"embeddings": trained, "ffn": frozen},
                },
                "seconds": {"train": 90.0, "test": 1.0, "all": 95.0},
                "resumed": seed == 2,
                "peak_memory_bytes": 123_000_000,
                "environment": ENVIRONMENT,
            } | (changes or {}).get((row, seed), {})
            records.append(record)
            settings = {
                "name": "tiny",
                "task": task,
                "data": {"root": "/here", "limit": 9},
                "training": {"epochs": 2.0},
            }
            methods = [{"method": "freeze", "ffn": "random", "seed": seed}]
            (run / "run.json").write_text(json.dumps(settings | {"row": row, "seed": seed, "methods": methods}))
            (run / "metrics.json").write_text(json.dumps(record))
            log = [{"loss": 4.0, "epoch": 0.5, "step": 10}, {"loss": 3.0, "epoch": 1.5, "step": 30}]
            log += [{"eval_loss": 3 - e / 2, "eval_perplexity": 9.0, "epoch": float(e), "step": 20 * e} for e in (1, 2)]
            (run / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in [*log, log[-1]]))
    write_lines(folder, records)
    (folder / "command.txt").write_text("hf-freeze run tiny.yaml --seeds 3\n")
    return records


def sizes(*totals):
    """Changes of records: a row each of so many parameters, stored as they are."""
    count = {"trainable_share": 1.0, "by_component": {}}
    return {
        (row, 1): {"parameters": count | dict.fromkeys(("total", "trainable", "stored"), n) | {"stored_bytes": 4 * n}}
        for row, n in zip(ROWS, totals, strict=True)
    }


def write_lines(folder, records):
    (folder / "results.jsonl").write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), "utf-8")


class Page(HTMLParser):
    """What a page refers to, its ids, and whether its elements are closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.links, self.scripts = [], [], [], 0
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.scripts += tag == "script"
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values[name] for name in ("src", "href", "xlink:href", "action") if name in values]
        if tag not in ("meta", "link", "br", "img", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


EVIL = "<script>alert('x')</script> & \"q\" $a$ | b"
