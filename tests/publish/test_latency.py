"""`hf-freeze latency`: what is measured, for models of every kind, and what a user sees of it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.cases import plain
from support.models import build
from support.text import SOURCE
from test_export import marian, save, words
from typer.testing import CliRunner

from hf_freeze import make_variant, methods
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.cli import app
from hf_freeze.publish import latency, latency_worker
from hf_freeze.publish.export import export_model
from hf_freeze.publish.latency import Latency, draw, measure, table

TEXTS = ["w5 w9 w3", "w8 w4 w4 w7 w30", "w3", "w11 w12"]


class Fork:
    """What `subprocess.Popen` starts here, in a fork of this process, which has imported all that it needs."""

    def __init__(self, command: list[str], **options: object) -> None:
        requests, requests_end = os.pipe()
        answers_end, answers = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.dup2(requests, 0)
            os.dup2(answers, 1)
            sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115
            try:
                latency_worker.serve()
            finally:
                os._exit(0)
        os.close(requests)
        os.close(answers)
        self.stdin, self.stdout = os.fdopen(requests_end, "w"), os.fdopen(answers_end)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        return os.waitpid(self.pid, 0)[1]


@pytest.fixture
def forked(monkeypatch):
    """For tests of what is asked and answered: a new process imports for seconds."""
    if hasattr(os, "fork"):
        monkeypatch.setattr(latency, "subprocess", SimpleNamespace(Popen=Fork, PIPE=None, DEVNULL=None))


@pytest.fixture(scope="module")
def translator(tmp_path_factory) -> Path:
    model = make_variant(marian(words(40)), [methods.LowRank(rank=3)])
    return save(tmp_path_factory.mktemp("latency") / "model", model, words(40))


def test_folders_take_turns_and_do_the_same_work(translator, tmp_path, monkeypatch):
    """The first in a new process, as for a user."""
    if hasattr(os, "fork"):
        start = iter([subprocess.Popen, Fork])
        processes = SimpleNamespace(
            Popen=lambda *a, **o: next(start)(*a, **o), PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL
        )
        monkeypatch.setattr(latency, "subprocess", processes)
    served = export_model(translator, "ctranslate2", out=tmp_path / "served")
    said: list[str] = []
    results = measure(
        [translator, served], TEXTS, batches=(1, 3), new_tokens=5, exactly=True, rounds=2, say=said.append
    )
    assert [one.engine for one in results] == ["PyTorch", "ctranslate2"]
    for one in results:
        assert one.task == "seq2seq-lm"
        assert one.sizes == {1: [(1, 5)] * 8, 3: [(3, 15), (1, 5)] * 2}
        assert len(one.first) == 8
        assert min(one.first) > 0
        assert one.per_text(1) == pytest.approx(sum(one.batches[1]) / 8)
        assert one.tokens_per_second(1) == pytest.approx(5000 * 8 / sum(one.batches[1]))
        assert 100 < one.memory < 10_000
    assert results[0].cold_start > 0.3  # no Python imports torch in less
    assert results[0].megabytes == pytest.approx((translator / "model.safetensors").stat().st_size / 1e6)
    middle, low, high = results[1].ratio_to(results[0], 1)
    assert 0 < low <= middle <= high
    said = [line for line in said if "busy" not in line]
    assert said[0] == f"opening {translator} (1 of 2)"
    assert said[-1] == "round 2 of 2"


def test_one_process_answers_for_all_folders(translator, tmp_path, forked, monkeypatch):
    started, popen = [], latency.subprocess.Popen
    monkeypatch.setattr(latency.subprocess, "Popen", lambda *a, **o: started.append(popen(*a, **o)) or started[-1])
    served = export_model(translator, "ctranslate2", out=tmp_path / "served")
    worker = latency.Worker()
    given = {"batches": (1,), "new_tokens": 5, "exactly": True, "rounds": 1, "worker": worker}
    for _ in range(2):
        results = measure([translator, served], TEXTS, **given)
        assert [one.engine for one in results] == ["PyTorch", "ctranslate2"]
        assert [one.sizes for one in results] == [{1: [(1, 5)] * 4}] * 2
    with pytest.raises(ValueError, match=r"nowhere"):
        measure([tmp_path / "nowhere"], TEXTS, **given)
    assert measure([served], TEXTS, **given)[0].engine == "ctranslate2", "the process goes on after an error"
    worker.close()
    assert len(started) == 1


def test_a_folder_in_onnx_answers_without_pytorch_and_does_the_same_work(translator, tmp_path):
    """In a new process, as for a user."""
    served = export_model(translator, "onnx", out=tmp_path / "served", quantization="int8")
    (one,) = measure([served], TEXTS, batches=(1, 4), new_tokens=5, exactly=True, rounds=1)
    assert (one.engine, one.task) == ("onnx-int8", "seq2seq-lm")
    assert one.sizes == {1: [(1, 5)] * 4, 4: [(4, 20)]}
    assert 20 < one.memory < 200  # MB; of PyTorch alone they are more
    assert 0 < one.cold_start < 20


def test_a_folder_that_the_runtime_refuses_is_measured_with_transformers(translator, tmp_path, forked):
    served = export_model(translator, "onnx", out=tmp_path / "served")
    plain = measure([served], TEXTS, batches=(4,), new_tokens=6, rounds=1)[0]
    settings = json.loads((served / "generation_config.json").read_text())
    (served / "generation_config.json").write_text(json.dumps(settings | {"encoder_no_repeat_ngram_size": 40}))
    (one,) = measure([served], TEXTS, batches=(4,), new_tokens=6, rounds=1)
    assert (one.engine, plain.engine) == ("onnx by transformers", "onnx")
    assert one.sizes == plain.sizes


def test_a_translation_ends_where_the_model_ends_it(translator, forked):
    (one,) = measure([translator], TEXTS, batches=(4,), new_tokens=12, rounds=1)
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(translator), AutoTokenizer.from_pretrained(translator)
    encoded = tokenizer(TEXTS, padding=True, return_tensors="pt", return_token_type_ids=False)
    outputs = model.generate(**encoded, max_new_tokens=12, num_beams=1, do_sample=False)[:, 1:]
    expected = sum(row.index(1) + 1 if 1 in row else len(row) for row in outputs.tolist())
    assert one.sizes == {4: [(4, expected)]}


def test_a_classifier_and_a_language_model(tmp_path, forked):
    classifier = save(tmp_path / "bert", build(plain(ARCHITECTURES["bert"], task="sequence-classification")))
    generator = save(tmp_path / "gpt2", build(plain(ARCHITECTURES["gpt2"], task="causal-lm")))
    one, other = measure([classifier, generator], TEXTS, batches=(2,), new_tokens=4, exactly=True, rounds=1)
    assert (one.first, one.tokens_per_second(2)) == ([], 0)
    assert table([one])[0].keys() == {
        "folder",
        "engine",
        "files, MB",
        "cold start, s",
        "2: ms",
        "2: texts/s",
        "memory, MB",
    }
    assert other.sizes == {2: [(2, 8)] * 2}


def test_a_busy_machine_is_named(translator, monkeypatch, forked):
    for load, expected in [
        (99.0, ["this machine is busy (99.0 processes for 2 cores): times will be too long"]),
        (1.0, []),
    ]:
        monkeypatch.setattr(latency.os, "getloadavg", lambda load=load: (load, 0.0, 0.0), raising=False)
        monkeypatch.setattr(latency.os, "cpu_count", lambda: 2)
        said = []
        measure([translator], TEXTS, batches=(1,), new_tokens=1, rounds=1, say=said.append)
        assert [line for line in said if "busy" in line] == expected


def test_what_cannot_be_measured(translator, tmp_path, forked):
    for folders, options, message in (
        ([], {}, "no folder to measure"),
        ([translator], {"texts": ["  "]}, "the texts are empty"),
        ([translator], {"new_tokens": 0}, "new_tokens=0: must be at least 1"),
        ([translator], {"batches": (0,)}, "batch=0: must be at least 1"),
        ([tmp_path], {}, f"{tmp_path}: .*no config.json|{tmp_path}: .*does not appear to have|{tmp_path}: .*"),
    ):
        arguments = {"texts": TEXTS, "rounds": 1} | options
        with pytest.raises(ValueError, match=message) as error:
            measure(folders, **arguments)
        assert "\n" not in str(error.value)


def test_command_line(translator, tmp_path, forked):
    lines = [json.dumps({"sentence": text}) for text in SOURCE]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    arguments = [
        "latency",
        translator,
        "--texts",
        tmp_path / "texts.jsonl",
        "--column",
        "sentence",
        "--batch",
        2,
        "--rounds",
        1,
        "--new-tokens",
        2,
    ]
    arguments += ["--out", tmp_path / "out"]
    done = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert done.exit_code == 0, done.output
    assert "tokens/s" in done.output
    assert f"Written: {tmp_path / 'out' / 'latency.json'}" in done.output
    (written,) = json.loads((tmp_path / "out" / "latency.json").read_text())
    assert written["task"] == "seq2seq-lm"
    assert (tmp_path / "out" / "latency.md").read_text().startswith("| folder | engine | files, MB |")
    assert (tmp_path / "out" / "latency.png").read_bytes()[:4] == b"\x89PNG"
    wrong = CliRunner().invoke(app, ["latency", str(translator), "--texts", str(tmp_path / "none.txt")])
    assert wrong.exit_code == 2
    assert "none.txt" in wrong.output


def test_the_picture_has_a_bar_for_each_folder(tmp_path):
    results = [
        Latency(
            f"runs/row-{row}/model", "PyTorch", "seq2seq-lm", 1.0, 2.0, batches={1: [3.0, 4.0]}, sizes={1: [(1, 2)] * 2}
        )
        for row in (0, 1, 2)
    ]
    draw(results, tmp_path / "latency.png")
    assert (tmp_path / "latency.png").stat().st_size > 5000
    assert [row["folder"] for row in table(results)] == ["row-0", "row-1", "row-2"]
