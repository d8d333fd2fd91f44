"""Every benchmark says what it claims, and runs at its smallest setting. What it times is not judged here; sizes are."""

import functools
import importlib
import itertools
import json
import math
import re
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import spearmanr
from support import ROOT
from support.cases import ALL
from torch import distributed
from transformers import AutoModel, BertConfig, MarianConfig

from hf_freeze import make_variant, methods, stored_bytes
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.lab import data
from hf_freeze.lab.runs.backbones import backbone_config

FOLDER = ROOT / "benchmarks"
NAMES = sorted(file.stem for file in FOLDER.glob("*.py") if not file.name.startswith("_"))
assert NAMES
slow = pytest.mark.skipif(not ALL, reason="a benchmark that takes seconds: run by make test-all")


@pytest.fixture
def run(monkeypatch, capsys):
    """run(name, *arguments) -> what the benchmark prints."""
    monkeypatch.syspath_prepend(FOLDER)
    shared = importlib.import_module("_shared")
    monkeypatch.setattr(shared.product_rate, "__defaults__", (128,))  # the size of 50 products that are timed
    monkeypatch.setattr(shared.copy_rate, "__defaults__", (1 << 20,))  # bytes
    monkeypatch.setattr(shared.best, "__defaults__", (1,))  # times that work is timed

    def call(name, *arguments):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        importlib.import_module(name).main()
        return capsys.readouterr().out

    return call


@pytest.fixture
def in_this_process(monkeypatch):
    """What benchmarks do in new processes, for the sake of memory and time, which are not judged here."""
    monkeypatch.syspath_prepend(FOLDER)
    shared = importlib.import_module("_shared")
    monkeypatch.setattr(shared, "in_new_process", lambda work, *arguments, **variables: work(*arguments))

    def in_group_of_one(work, count, *arguments, **variables):
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        try:
            return [work(*arguments)] * count
        finally:
            distributed.destroy_process_group()

    monkeypatch.setattr(shared, "in_new_group", in_group_of_one)


@pytest.mark.parametrize("name", NAMES)
def test_help_states_the_claim_and_the_command(name, run, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(name, "--help")
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert re.search(r"^Claims?: ", printed, re.MULTILINE)
    assert f"python benchmarks/{name}.py" in printed


def test_rng_speed(run):
    assert re.search(r"ratio [\d.]+ \(claim: at least 0.5\)", run("rng_speed", "--rounds", "1"))


def test_derive(run, in_this_process):
    printed = run("derive", "--types", "roberta", "--layers", "2", "--hidden", "32", "--rounds", "2")
    assert re.search(r"claims: roberta: (passed|missed)", printed)


@slow
def test_scale_data(run, in_this_process, monkeypatch, tmp_path):
    benchmark = importlib.import_module("scale_data")
    monkeypatch.setattr(benchmark, "use_cache", lambda cache: cache.mkdir(exist_ok=True))  # that of the tests
    monkeypatch.setattr(benchmark, "LINES", 3000)
    arguments = ["--pairs", "300", "900", "--turns", "1", "--batches", "4", "--rounds", "1", "--processes", "1"]
    printed = run("scale_data", *arguments, "--folder", str(tmp_path / "files"))
    assert len((tmp_path / "files" / "900.source").read_text().splitlines()) == 900
    assert re.search(r"slopes: read [-\d.]+, tokenised", printed)
    assert re.search(r"resident, GB: (passed|missed)", printed)


def test_precision(run, monkeypatch):
    monkeypatch.setattr(data, "builtin_corpus", functools.partial(data.builtin_corpus, train=300, dev=1, test=1))
    printed = run("precision", "--preset", "demo", "--batches", "1", "--rounds", "1")
    assert re.search(r"bf16 takes [\d.]+ times as long as fp32; claim: (passed|missed)", printed)
    assert printed.count("| chosen |") == 1


@slow
def test_on_the_fly(run, monkeypatch):
    benchmark = importlib.import_module("on_the_fly")
    monkeypatch.setattr(benchmark, "forked", lambda work, *arguments: work(*arguments))
    sizes = {"width": 64, "layers": 1, "vocabulary": 500, "new-tokens": 2, "rounds": 1}
    printed = run("on_the_fly", *(str(part) for name, size in sizes.items() for part in (f"--{name}", size)))
    assert "memory of seeded tensors, at most 4 MB: passed in all 6" in printed
    assert printed.count("| sign, ") == 6


@slow
def test_never_stored(run, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.import_module("on_the_fly"), "forked", lambda work, *arguments: work(*arguments))
    write_results_of(tmp_path, {"0": 84.0, "3": 63.0, "3-sign": 67.0})
    sizes = {"width": 64, "layers": 1, "vocabulary": 500, "new-tokens": 2}
    arguments = [str(part) for name, size in sizes.items() for part in (f"--{name}", size)]
    printed = run("never_stored", *arguments, "--grid", str(tmp_path), "--picture", str(tmp_path / "picture.png"))
    assert re.search(r"\| all \| embeddings attention ffn \| (99|100)% \|", printed)
    assert "| signs | 3 | 50% | 67.0 ± 1.0 |" in printed
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def write_results_of(folder, scores):
    """Three seeds of rows of a grid, half of whose parameters are stored but for row 0."""
    records = [
        {
            "row": row,
            "seed": seed,
            "metrics": {"test_bleu": score + seed - 2},
            "parameters": {"stored": 2 if row == "0" else 1, "total": 2},
        }
        for row, score in scores.items()
        for seed in (1, 2, 3)
    ]
    (folder / "results.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))


def test_products_on_a_gpu_are_judged(run, monkeypatch):
    """With a timer that counts its calls, on the CPU, where the products are streamed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    printed = run("on_the_fly", "--parts", "gpu")
    assert "Products on a GPU: not measured, PyTorch finds no GPU." in printed
    assert "int8 on a GPU, beside cuBLAS: not measured" in printed
    benchmark = importlib.import_module("on_the_fly")
    monkeypatch.setattr(benchmark._shared, "copy_rate", lambda: 2e12)
    times = itertools.cycle([*(12, 10, 11), *(40, 40, 40), *(9, 8, 8), *(5, 5, 5)])  # cuBLAS, uniform, int8, sign

    def microseconds(work):
        assert torch.equal(work(0), work(1))
        return next(times)

    table, verdict = benchmark.gpu_products(32, torch.device("cpu"), microseconds)
    assert "| int8, 16 tokens | 10.00 to 12.00 | 8.00 to 9.00 | 1.25 | " in table
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if " tokens |" in line]
    assert len(lines) == 3 * 7
    assert all(0 < float(error) < 0.01 for line in lines for error in line[-2:])
    assert "read in bf16 at the 2.00 TB/s of a copy here 0.00; made by an H100 0.00 (glorot_uniform)" in table
    assert verdict == "passed in all 3"
    times = itertools.cycle([10] * 6 + [16] * 6)
    _, verdict = benchmark.gpu_products(32, torch.device("cpu"), microseconds)
    assert verdict == ("missed in 2 of 3: 1 tokens, 0.62 of at least 1 (0.62); 16 tokens, 0.62 of at least 1 (0.62)")


def test_freeze_step(run, in_this_process, tmp_path):
    out = tmp_path / "table.md"
    arguments = ["--preset", "demo", "--vocab", "96", "--tokens", "64", "--rows", "0", "5", "--rounds", "1"]
    printed = run("freeze_step", *arguments, "--out", str(out))
    # By hand the losses, the state and what autograd keeps are the same, or it would have stopped.
    assert re.search(r"step: at most [\d.]+ of the same done by hand", printed)
    assert float(re.findall(r"state and kept as by hand and at most ([\d.]+) of row 0", printed)[0]) < 1
    state = {
        label: float(cells.split(" | ")[5])
        for label, cells in re.findall(r"^\| (✓✓✓|✗✗✓).*?\| (.*) \|$", printed, re.M)
    }
    d, f, layers, blocks, vocabulary = 96, 384, 4, 6, 96
    ffn, norms = layers * (2 * d * f + f + d), 2 * d * (2 * 2 + 2 * 3)
    frozen = vocabulary * d + blocks * 4 * (d * d + d) + 2 * 256 * d  # two tables of sinusoids, never trained
    assert state["✗✗✓"] == pytest.approx((16 * (ffn + norms + vocabulary) + 4 * frozen) / 1e6, abs=0.051)
    assert state["✗✗✓"] < state["✓✓✓"]
    assert out.read_text(encoding="utf-8").startswith("`python benchmarks/freeze_step.py --preset demo")


def test_checkpoint_size(run):
    printed = run("checkpoint_size", "--preset", "demo", "--vocab", "96", "--rounds", "1")
    d, blocks, norms, vocabulary = 96, 6, 10, 96
    attention_alone = 4 * (blocks * 4 * (d * d + d) + norms * 2 * d + vocabulary)  # row 4, in fp32
    everything = attention_alone + 4 * (vocabulary * d + 4 * (8 * d * d + 5 * d))
    for size in (attention_alone, everything):
        assert f" | {size:,} | 0 | " in printed  # nothing above what must be stored
    assert re.search(r"save ratio [\d.]+ \(.*load ratio [\d.]+ \(", printed)


@slow
def test_training_throughput(run):
    printed = run("training_throughput", "--preset", "demo", "--steps", "2", "--rounds", "1")
    assert re.search(r"ours to the plain loop: ratio [\d.]+ \(claim", printed)
    padding = {name: float(share) for name, share in re.findall(r"^\| ([\w' ,]+?) \|.*\| ([\d.]+) % \|", printed, re.M)}
    assert padding["ours"] == padding["plain loop"] < padding["Trainer's defaults"]


def test_linear_methods(run, tmp_path):
    out, picture = tmp_path / "table.md", tmp_path / "picture.png"
    printed = run("linear_methods", "--quick", "--out", str(out), "--plot", str(picture))
    assert "held with factors below dense: passed in all 5" in printed  # bytes, not times
    for bar in ("layer at most 1.05 of dense", "peer at least 2.5 times the layer", "saved at least 0.85"):
        assert f"- {bar}" in printed
    layers = re.findall(r"^\| ([^|]*) \| 8 \| .*\| (dense|factors) \| ([\d.]*) \|", printed, re.M)
    assert [name for name, _, other in layers if other] == [
        "low rank, 25 %", "tensor train, rank 2", "tensor train, rank 8", "Tucker, rank 2", "Tucker, rank 3"
    ]  # fmt: skip
    assert all(way == "dense" for _, way, other in layers if not other)
    assert out.read_text(encoding="utf-8").startswith("`python benchmarks/linear_methods.py --quick")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_linear_methods_counts_each_storage_once(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    module = importlib.import_module("linear_methods")
    linear = torch.nn.Linear(4, 3)
    assert module.held_bytes(linear) == module.held_bytes(linear, linear.weight.T, [linear]) == 4 * 15
    linear.kept = {"key": ([(linear.bias, 0)], torch.zeros(5))}
    assert module.held_bytes(linear) == 4 * 20


def test_heads(run, tmp_path):
    out = tmp_path / "table.md"
    small = [
        "--layers",
        "1",
        "--width",
        "96",
        "--lengths",
        "8",
        "130",
        "--batches",
        "1",
        "2",
        "--rounds",
        "1",
        "--turn",
        "1",
    ]
    printed = run("heads", *small, "--out", str(out))
    rows = re.findall(r"^\| ([^|]+) \| (encoder|decoder|fixed) \| ([^|]+) \| .* \| ([-\d.]*) \|$", printed, re.M)
    pruned = [(row, of, size) for row, of, size, saved in rows if saved]
    assert len(pruned) == len(set(pruned)) == 2 * 4 * 3
    assert len(rows) == 2 * 4 * 5 + 4 * 3 + 1
    for bar, places in (
        ("saved at least 0.85 of what could be", 24),
        ("fixed heads faster than dense from length 128 on", 4),
        ("scoring at most 1.15 of training", 1),
    ):
        assert re.search(rf"^- {bar}: (passed in all|missed in \d+ of) {places}\b", printed, re.M)
    assert out.read_text(encoding="utf-8").startswith("`python benchmarks/heads.py --layers 1")


def test_heads_against_a_peer(run):
    """The benchmark itself checks that both give the same logits."""
    pytest.importorskip("torch_pruning", reason="Torch-Pruning is installed by hand")
    small = ["--layers", "1", "--width", "96", "--lengths", "8", "--batches", "1", "--rounds", "1", "--turn", "1"]
    printed = run("heads", *small, "--peer")
    assert (
        len(re.findall(r"against Torch-Pruning \(ours opens again: yes; theirs opens again: no\) \| encoder", printed))
        == 3
    )


@slow
def test_embeddings(run, tmp_path):
    out = tmp_path / "table.md"
    printed = run("embeddings", "--quick", "--out", str(out))
    width, sizes = 32, (400, 16_000)
    ranks = {"dense again": None, "E = d/4": 8, "E = d/8": 4, "layers shared": None, "layers shared, E = d/4": 8}
    for name, rank in ranks.items():  # one table with its projection, tied, so once; in fp32
        expected = [4 * (v * width if rank is None else rank * (v + width)) / 1e6 for v in sizes]
        assert f"| {name} | {expected[0]:.3f} | {expected[1]:.3f} |" in printed
    assert "| 1/4 of the ids | 0.013 | 0.512 |" in printed
    widths = [16, 24, 32]  # of 4, 2 and 1 groups on 8 columns; with biases and norms, and the output's projection
    unit = 8 * 16 // 4 + (8 + 16) * 24 // 2 + (8 + 24) * 32 + 3 * sum(widths) + 32 * width + width
    assert "| DeFINE | " + " | ".join(f"{4 * (8 * v + unit + 8 * width) / 1e6:.3f}" for v in sizes) in printed
    # bands of V/16, 3 V/16 and 3 V/4 rows, with a matrix of two tails
    of_bands = [4 * (v * (32 + 3 * 8 + 12 * 2) // 16 + 32 * (32 + 8 + 2) + 2 * 32) / 1e6 for v in sizes]
    assert f"| adaptive | {of_bands[0]:.3f} | {of_bands[1]:.3f} |" in printed
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| (.*) \|$", out.read_text(encoding="utf-8"), re.M)
    cells = {(name, work): rest.split(" | ") for name, work, rest in rows if "(" in rest}  # of the larger V
    assert len(cells) == 8 + 3 * 7 + 5 + 2 * 4 + 2 * 2
    assert [key for key, found in cells.items() if found[3]] == [
        (f"1/{part} of the ids", f"{work} {number}")
        for part in (2, 4)
        for work in ("output, tokens", "decoding step, batch")
        for number in (1, 4)
    ]
    hidden, logits = width, sizes[1]
    for name, rank, macs in (("dense again", width, width * logits), ("E = d/4", 8, 8 * (width + logits))):
        table = rank * logits + (0 if rank == width else rank * width)
        assert cells[name, "output, tokens 1"][4:6] == [
            f"{macs / 1e6:,.2f}",
            f"{4 * (table + hidden + logits) / 1e6:,.2f}",
        ]
    for bar, places in (
        ("output at E = d/4 faster than dense from V = 16,000 on", 2),
        ("saved at least 0.85 of the removed share of the output", 8),
        ("look-up of rows that DeFINE keeps at most 1.05 of dense", 4),
        ("decoding step, factorised, DeFINE or shared, at most 1.05 of dense", 20),
    ):
        assert re.search(rf"^- {bar}: (passed in all|missed in \d+ of) {places}\b", printed, re.M)
    assert "- adaptive softmax, training step faster than full from V = 32,000 on: not measured" in printed
    assert out.read_text(encoding="utf-8").startswith("`python benchmarks/embeddings.py --quick")


def test_trimming(run, tmp_path):
    text = data.builtin_corpus(train=60, dev=1, test=12)
    tokenizer = data.train_tokenizer([*text["train"]["source"]], 300, kind="wordpiece")
    AutoModel.from_config(BertConfig(**ARCHITECTURES["bert"].tiny | {"vocab_size": len(tokenizer)})).save_pretrained(
        tmp_path / "model"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    for split in ("train", "test"):
        (tmp_path / split).write_text("\n".join(text[split]["source"]), encoding="utf-8")
    files = ["--texts", str(tmp_path / "train"), "--held-out", str(tmp_path / "test"), "--count", "10"]
    printed = run("trimming", str(tmp_path / "model"), *files, "--coverages", "0.7", "1")
    assert "10 held-out texts; covered texts get the same vectors bit for bit: passed in all 2" in printed
    rows = [line.split(" | ") for line in re.findall(r"^\| [\dw].*", printed, re.M)]
    whole, few, every = ([float(cell.replace(",", "")) for cell in row[1:5]] for row in rows)
    assert few[0] < every[0] <= whole[0], "tokens"
    assert few[3] > every[3] >= whole[3], "tokens of a text"


@pytest.fixture
def translators(tmp_path):
    """A folder with a translator of two layers and one of one, and the arguments that name a text."""
    text = data.builtin_corpus(train=40, dev=4, test=4)
    tokenizer = data.train_tokenizer([*text["train"]["source"], *text["train"]["target"]], 300)
    sizes = {"vocab_size": len(tokenizer), "decoder_vocab_size": len(tokenizer), "max_position_embeddings": 128}
    config = MarianConfig(**ARCHITECTURES["marian"].tiny | sizes)
    for name, chosen in {
        "model": [methods.FactorizedEmbedding(rank=4)],
        "small": [methods.LayerSelection(keep={"decoder": [0]})],
    }.items():
        for saved in (make_variant(config, chosen, task="seq2seq-lm"), tokenizer):
            saved.save_pretrained(tmp_path / name)
    for side in ("source", "target"):
        (tmp_path / side).write_text("\n".join(text["test"][side]), encoding="utf-8")
    texts = ["--text", str(tmp_path / "source"), "--target", str(tmp_path / "target")]
    return tmp_path, [*texts, "--rounds", "1", "--new-tokens", "6"]


def test_export(run, translators):
    folder, arguments = translators
    printed = run("export", str(folder / "model"), *arguments, "--engines", "ctranslate2", "--beams", "2")
    assert re.search(r"^\| ctranslate2 fp32 \| 2 \| [\d.]+ \| [\d.]+ \| 4 of 4 \|", printed, re.M)
    assert "fp32 as PyTorch: passed in all 2" in printed


@slow
def test_shortlists(run, translators):
    folder, _ = translators
    texts = [str(folder / "source"), str(folder / "target")]
    sizes = ["--vocabulary", "400", "--width", "32", "--lengths", "100", "--rounds", "1"]
    printed = run("shortlists", str(folder / "model"), "--train", *texts, "--test", *texts, *sizes)
    rows = [line.split(" | ") for line in re.findall(r"^\| (?:50|100) \+.*", printed, re.M)]
    assert [row[1] for row in rows] == ["1", "32"] * 2
    assert all(row[3] == "100.0 %" for row in rows)  # short texts with as many types as a list holds
    assert "BLEU within 0.2: " in printed
    assert len(re.findall(r"^\| (?:MODEL|random) \| (?:PyTorch|ONNX) \|", printed, re.M)) == 8


def test_rank_correlation_of_pairs(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    module = importlib.import_module("served_encoders")
    one, other = (torch.nn.functional.normalize(torch.randn(9, 4), dim=1) for _ in range(2))
    pairs = [(i, j) for i in range(9) for j in range(i)]
    expected = spearmanr(*([float(each[i] @ each[j]) for i, j in pairs] for each in (one, other))).statistic
    assert module.rank_correlation(one, other) == pytest.approx(expected)


@slow
def test_served_encoders(run, tmp_path):
    text = data.builtin_tenses(seed=0, train=80, dev=1, test=20)
    tokenizer = data.train_tokenizer([*text["train"]["sentence"]], 300, kind="wordpiece")
    config = BertConfig(**ARCHITECTURES["bert"].tiny | {"vocab_size": len(tokenizer), "max_position_embeddings": 64})
    config.id2label = {number: str(number) for number in sorted(set(text["train"]["label"]))}
    for split in ("train", "test"):
        lines = [json.dumps({"sentence": each["sentence"], "label": each["label"]}) for each in text[split]]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")
        (tmp_path / split).write_text("\n".join(text[split]["sentence"]), encoding="utf-8")
    halved = [methods.HeadPruning(share=0.5), methods.FFNPruning(width=16)]
    for row, chosen in {"0": [], "pruned": halved}.items():
        folder = tmp_path / "runs" / f"row-{row}-seed-3"
        for saved in (make_variant(config, chosen, task="sequence-classification"), tokenizer):
            saved.save_pretrained(folder / "model")
        (folder / "metrics.json").touch()
    whole = AutoModel.from_config(config)
    for parameter in whole.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    whole.save_pretrained(tmp_path / "whole")
    tokenizer.save_pretrained(tmp_path / "whole")

    files = ["--texts", str(tmp_path / "train.jsonl"), "--test", str(tmp_path / "test.jsonl"), "--rounds", "1"]
    printed = run("served_encoders", "--classifier", str(tmp_path / "runs"), *files)
    assert (
        len(re.findall(r"^\| (?:0|pruned) \| (?:PyTorch|onnx.*?) \| [\d.]+ \([\d.]+ to [\d.]+\) \|", printed, re.M))
        == 8
    )
    assert "in fp32, other answers, or 1 - cosine: passed in all 2" in printed

    files = ["--texts", str(tmp_path / "train"), "--test", str(tmp_path / "test"), "--rounds", "1", "--teach", "64"]
    printed = run("served_encoders", "--embedder", str(tmp_path / "whole"), *files)
    assert re.search(r"^\| whole \| onnx \| 1.0000 \| 1.0000 \| 1.0000 \| 1.0000 \|$", printed, re.M)
    rows = {
        name: float(mean)
        for name, mean in re.findall(
            r"^\| ([\w, ]+) \| PyTorch \| ([\d.]+) \| [\d.]+ \| [\d.]+ \| [\d.]+ \|$", printed, re.M
        )
    }
    assert list(rows) == ["whole", "pruned", "taught", "trimmed", "taught, trimmed"]
    assert rows["pruned"] < rows["whole"] == 1.0


@slow
def test_ship(run, translators, monkeypatch):
    folder, arguments = translators
    monkeypatch.syspath_prepend(FOLDER)
    module = importlib.import_module("ship")

    def in_no_process(*arguments, **variables):  # which takes ten seconds each
        return 0.0, 0.0

    monkeypatch.setattr(importlib.import_module("_shared"), "in_new_process", in_no_process)
    models = [str(folder / name) for name in ("model", "small")]
    printed = run("ship", *models, *arguments, "--forms", "fp32", "native", "bf16", "nf4", "ctranslate2 int8")
    sizes = dict(re.findall(r"^\| (\w+, [\w ]+) \| ([\d.]+) \|", printed, re.M))
    assert len(sizes) == 10
    assert float(sizes["small, nf4"]) < float(sizes["small, bf16"]) < float(sizes["small, fp32"])
    weighed = module.bytes_of(folder / "small")
    assert float(sizes["small, fp32"]) == pytest.approx(weighed / 1e6, abs=0.01)
    assert re.search(
        r"small: (passed|MISSED) -?[\d.]+ BLEU lost \(at most 1\.0\), passed [\d,]+ bytes \(below 2,000,000\)", printed
    )


@slow
def test_run_latency(run, tmp_path):
    text = data.builtin_corpus(train=40, dev=4, test=4)
    tokenizers = [
        data.train_tokenizer([*text["train"]["source"], *text["train"]["target"]], size) for size in (300, 80)
    ]
    settings = {"model_type": "marian", "config": {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
                "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
                "max_position_embeddings": 64}}  # fmt: skip
    rows = {
        "0": [],
        "neurons": [methods.FFNPruning(width=8)],
        "noise": [methods.VariationalDropout(training_size=9)],
        "taught": [methods.Distillation()],
        "other": [],
    }
    for row, chosen in rows.items():
        folder, tokenizer = tmp_path / f"row-{row}-seed-1", tokenizers[row == "other"]
        model = make_variant(backbone_config(settings, tokenizer), chosen, task="seq2seq-lm", init="marian")
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        run_of_it = {"teacher": {"row": "0", "seed": 1}} if row == "taught" else {"data": {}}
        (folder / "run.json").write_text(json.dumps(run_of_it), encoding="utf-8")
        record = {"label": f"the {row}", "parameters": {"stored_bytes": stored_bytes(model)}}
        (folder / "metrics.json").write_text(json.dumps(record), encoding="utf-8")
    (tmp_path / "row-unfinished-seed-1").mkdir()
    arguments = [str(tmp_path), "--rounds", "1", "--sentences", "3", "--new-tokens", "4"]
    with pytest.raises(SystemExit, match=r"different sizes, .*'other': 80, .*\}: compare them with --until-end"):
        run("run_latency", *arguments)
    printed = run("run_latency", *arguments, "--rows", "other", "--until-end")
    assert "3 sentences, each to the end that the model sets" in printed
    shutil.rmtree(tmp_path / "row-other-seed-1")
    printed = run("run_latency", *arguments, "--out", str(tmp_path / "table.md"))
    assert re.findall(r"^\| (\w+): the \1 \|", printed, re.M) == ["0", "neurons", "noise", "taught"]
    assert "3 sentences, 4 new tokens each" in printed
    for row, ratio in re.findall(r"^\| (\w+): .*?\| ([\d.]+) \(", printed, re.M):
        kept = json.loads((tmp_path / f"row-{row}-seed-1" / "latency.json").read_text("utf-8"))
        assert kept["decoding"]["1"]["ratio"] == pytest.approx(float(ratio), abs=5e-4)
        assert kept["decoding"]["64"]["first_ms"] > 0
        assert kept["conditions"] == "3 sentences of the test set, 4 new tokens each"
    (tmp_path / "text").write_text("a b\nc\n", encoding="utf-8")
    printed = run("run_latency", *arguments, "--rows", "neurons", "--text", str(tmp_path / "text"))
    assert "noise" not in printed
    assert "2 sentences" in printed
    with pytest.raises(
        SystemExit, match=r"no finished run of row 'unfinished'; choose from \['0', 'neurons', 'noise', 'taught'\]"
    ):
        run("run_latency", *arguments, "--rows", "unfinished")
    with pytest.raises(SystemExit, match="holds no finished run of row 0 of seed 2"):
        run("run_latency", *arguments, "--seed", "2")


def test_progressive(run):
    sizes = ["--layers", "2", "--width", "48", "--length", "8", "--batch", "2"]
    printed = run("progressive", *sizes, "--rounds", "1", "--steps", "1")
    assert len(re.findall(r"^\| Theseus, rate .* of the expected \|$", printed, re.M)) == 6
    assert len(re.findall(r"^\| LayerDrop, p = .* of p x layers \|$", printed, re.M)) == 4
    assert len(re.findall(r"^\| finalized, against a native model", printed, re.M)) == 2
    assert re.search(r"Theseus at most 1.1 of the expected: (passed|missed) in", printed)


@slow
def test_light_blocks(run, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    module = importlib.import_module("light_blocks")
    small = {"Lite": (2, [methods.LiteTransformer()]), "DeLighT": (2, [methods.DeLighT(n_min=1, n_max=2)])}
    for name, value in (("DECODED", 2), ("LAYERS", 2), ("BLOCKS", small)):
        monkeypatch.setattr(module, name, value)
    printed = run("light_blocks", "--width", "64", "--lengths", "8", "--tokens", "8", "--rounds", "1")
    works = ["forward", "training step", "decoding 1", "decoding 16"]
    rows = re.findall(r"^\| (.*?) \| (.*?) \| (forward|training step|decoding 1|decoding 16) \|", printed, re.M)
    assert [(name, what) for name, _, what in rows] == [
        (name, what) for name in ("plain, again", *small) for what in works
    ]
    for name, cost, _ in rows:  # widths come in steps of 32
        assert float(cost) == 1 if name.startswith("plain") else 0.6 < float(cost) < 1.4
    assert len(re.findall(r"^\| Lite \|  \| [37] taps, beside the attention \| 8 \|", printed, re.M)) == 2
    assert "the convolution takes no longer than the attention from 128 tokens on: not measured" in printed
    assert re.search(r"DeLighT's training step takes at most 1.3 of a plain one: (passed|missed) in", printed)


@slow
def test_recurrent_decoders(run, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    module = importlib.import_module("recurrent_decoders")
    monkeypatch.setattr(module, "UNITS", {name: module.UNITS[name] for name in ("attention", "SSRU")})
    printed = run(
        "recurrent_decoders",
        *("--width", "16", "--lengths", "2", "--rows", "1", "3", "--rounds", "1", "--at-least", "0"),
    )
    engines = ("PyTorch", "a layer, PyTorch", "ONNX Runtime")
    found = re.findall(r"^\| SSRU \| (.*?) \| ([13]) \| 2 \| \d+ \| \d+ \| [\d.]+ \(", printed, re.M)
    assert found == [(engine, rows) for engine in engines for rows in "13"]
    for engine in engines:
        assert re.search(rf"{engine}: (passed in all 2|missed in [12] of 2)", printed)


def test_solvers(run, in_this_process, tmp_path):
    printed = run("solvers", "--widths", "16", "32", "--picture", str(tmp_path / "solvers.png"))
    assert "| eliminate columns | " in printed
    assert (tmp_path / "solvers.png").stat().st_size > 10_000


def test_low_rank_solvers(run):
    printed = run("low_rank_solvers", "--sizes", "64x48x8")
    assert "error at most 1.02 times the least: passed in all 2" in printed


def test_scale(run, in_this_process, monkeypatch):
    monkeypatch.setitem(importlib.import_module("scale").SIZES, "0.1", (64, 176, 2, 4))
    printed = run("scale", "--sizes", "0.1", "--methods", "half heads")
    assert re.search(r"\| 0\.1 \| half heads \|.*\| yes \|", printed)
    assert "reloaded unequal: none" in printed


def test_convert(run, in_this_process, monkeypatch):
    monkeypatch.setitem(importlib.import_module("convert").SIZES, "0.1", (64, 176, 2, 4, 2))
    printed = run("convert", "--sizes", "0.1", "--methods", "half heads", "low rank")
    assert len(re.findall(r"^\| 0\.1 \| (?:half heads|low rank)(?:, merged)? \|", printed, re.M)) == 4
    assert re.search(r"two shards of 500 MB and 300 MB: (passed|missed)", printed)


def test_sharded(run, in_this_process, monkeypatch):
    benchmark = importlib.import_module("sharded")
    monkeypatch.setitem(benchmark.SIZES, "0.1", (64, 176, 2, 4, 100))
    printed = run("sharded", "--sizes", "0.1", "--steps", "2")
    assert len(re.findall(r"^\| 0\.1 (?:native|variant) \| 0 \| 0 \| (?:one|1 of 2|2 of 2) \|", printed, re.M)) == 6
    assert "losses to 0.0001: passed in all 4" in printed
    assert "5 steps resumed to 0.0001: passed in all 4" in printed


def test_hypervolumes_are_those_of_boxes(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    hypervolume = importlib.import_module("searched").hypervolume

    def model(bleu, size, work):  # ln(size) and ln(work) below the corner
        costs = {"parameters": {"stored_bytes": math.exp(-size)}, "multiply_adds": math.exp(-work)}
        return {"metrics": {"test_bleu": bleu}, **costs}

    corner = (1.0, 1.0)
    assert hypervolume([model(10, 2, 3)], corner) == pytest.approx(60)
    assert hypervolume([model(10, 2, 3), model(10, 1, 1)], corner) == pytest.approx(60)  # one within the other
    assert hypervolume([model(10, 2, 3), model(20, 1, 1)], corner) == pytest.approx(60 + 20 - 10)
    assert hypervolume([model(10, 2, 0)], corner) == 0


def test_a_budget_is_kept_if_it_is_met_or_refused_with_the_nearest(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(FOLDER)
    budgets = importlib.import_module("budgets")
    (tmp_path / "model").write_bytes(b"x" * 1000)
    done = SimpleNamespace(after=SimpleNamespace(ms=2.0, folder=tmp_path), whole=SimpleNamespace(ms=4.0))
    assert budgets.kept(budgets.Trial(1000, 50, result=done), None)
    assert not budgets.kept(budgets.Trial(999, 50, result=done), None)
    assert not budgets.kept(budgets.Trial(1000, 49, result=done), None)
    words = "the budget of {} is out of reach: the smallest shape (1 layer) needs about {}; "
    words += "give it at least that, and more to keep what the model does"
    refused = budgets.Trial(10, 50, refused=words.format("10 B", "1.0 kB"))
    assert (refused.nearest().max_bytes, refused.nearest().percent) == (1001, 50)
    assert budgets.kept(refused, budgets.Trial(1001, result=done))
    assert not budgets.kept(refused, None)
    assert not budgets.kept(refused, budgets.Trial(1001, refused="out of reach"))
    late = budgets.Trial(10, 30, refused=words.format("1.2 ms (30 % of the model's)", "2 ms"), whole_ms=4.0)
    assert (late.nearest().max_bytes, late.nearest().percent) == (None, 52.5)


@slow
def test_budgets(run, tmp_path):
    printed = run("budgets", "--tasks", "tags", "--trials", "1", "--steps", "5", "--keep", str(tmp_path))
    assert "1 of 1 budgets kept" in printed
