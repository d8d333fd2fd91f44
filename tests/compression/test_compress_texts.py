"""A compression from texts alone: the integer program against all shapes, the budget, the command, going on, and wrong inputs."""

import io
import itertools
import json
import math
import re
import warnings
from dataclasses import asdict, replace

import pytest
import torch
from rich.console import Console
from support.cases import ALL
from support.tokenizers_of_each_kind import word_level, wordpiece
from support.tracing import trace_once
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, MarianConfig, MarianMTModel
from typer.testing import CliRunner

import hf_freeze
from hf_freeze import make_variant
from hf_freeze.analysis.vocabulary import count_tokens
from hf_freeze.cli import app
from hf_freeze.compression import bench, maker
from hf_freeze.compression import compression as story
from hf_freeze.compression.blocks import Block, blocks_of
from hf_freeze.compression.budget import Budget, read_bytes
from hf_freeze.compression.choose import Options, Program, levels
from hf_freeze.compression.compression import Compression, _few_tokens_said_once
from hf_freeze.compression.distances import Distances, layer_distances
from hf_freeze.compression.engine import ENGINES, Stopwatch, serve
from hf_freeze.compression.inputs import Inputs, batches_of
from hf_freeze.compression.original import Subject
from hf_freeze.compression.prices import Prices, Sizes, sizes_of
from hf_freeze.compression.progress import Progress, Stopped
from hf_freeze.compression.settings import Settings
from hf_freeze.compression.shape import full_shape
from hf_freeze.io import bytes_of
from hf_freeze.methods import LayerSelection
from hf_freeze.model.samples import samples_of
from hf_freeze.publish.export.served import opened
from hf_freeze.training.healing import Healed

WORDS = [
    "a",
    "dog",
    "runs",
    "over",
    "the",
    "green",
    "field",
    "while",
    "two",
    "men",
    "look",
    "at",
    "an",
    "old",
    "red",
    "car",
    "near",
    "some",
    "trees",
]


_TRACES = "traces six models: HF_FREEZE_TESTS=all"

# Neither heads nor tokens go, of which less is measured then.
FEW_PARTS = {"engine": "torch", "heal": 0, "native": True, "keep_vocabulary": True}


def texts(count=60):
    generator = torch.Generator().manual_seed(3)
    return [" ".join(WORDS[i] for i in torch.randint(len(WORDS), (8,), generator=generator)) for _ in range(count)]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A sentence encoder of two layers, with its tokenizer."""
    folder = tmp_path_factory.mktemp("encoder")
    tokenizer = wordpiece(texts())
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=40,
        initializer_range=0.2,
    )
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def block(name, units, heads, generator):
    losses = torch.rand(units, generator=generator, dtype=torch.float64).cumsum(0)
    order = torch.randperm(units, generator=generator).tolist()
    return Block(
        name, units * 100, 100.0, order, [0.0, *losses.tolist()], [[unit] for unit in range(units)] if heads else ()
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("uniform", [False, True])
def test_the_program_finds_the_best_of_all_shapes(seed, uniform):
    generator = torch.Generator().manual_seed(seed)
    blocks = {
        f"encoder.{layer}.{kind}": block(f"encoder.{layer}.{kind}", 3, kind == "self", generator)
        for layer in range(2)
        for kind in ("self", "ffn")
    }
    losses = Distances(
        layers={"encoder": {2: ((0, 1), 0.0), 1: ((1,), 0.9)}},
        factors={"heads": 1.5, "neurons": 0.7},
        four_bits={"tables": 0.4} | dict.fromkeys(blocks, 0.15),
        tokens={30: 0.0, 20: 0.25},
    )
    prices = Prices(blocks, {"encoder": 2}, Sizes(of_token=10, tokens=30, token_bytes=2.0, bits=8, bytes=3000.0))
    options = Options(bits=(8, 4), uniform=uniform)
    program = Program(blocks, losses, prices, options)
    for limit in (900.0, 1300.0, 2000.0, 2900.0):
        best = math.inf
        for depth, (tokens, bits) in itertools.product((2, 1), itertools.product((30, 20), (8, 4))):
            kept, loss = losses.layers["encoder"][depth]
            of_tables = prices.of_tables(tokens, bits)[0]
            table_loss = losses.tokens[tokens] + losses.of_bits("tables", bits, 1.0)
            some = [b for b in blocks.values() if b.place[1] in kept]
            choices = [list(itertools.product(levels(b, options), options.bits)) for b in some]
            for chosen in itertools.product(*choices):
                pairs = list(zip(some, chosen, strict=True))
                widths = {(b.kind, value) for b, value in pairs}
                if uniform and len(widths) > 2:
                    continue
                size = prices.fixed_bytes + of_tables + sum(prices.of_block(b, *value)[0] for b, value in pairs)
                total = loss + table_loss
                total += sum(losses.of_units(b, u) + losses.of_bits(b.name, n, u / b.units) for b, (u, n) in pairs)
                if size <= limit:
                    best = min(best, total)
        found = program.solve(limit, None)
        if found is None:
            assert best == math.inf
        else:
            shape, loss = found
            assert loss == pytest.approx(best, rel=2e-3, abs=1e-9)
            assert prices.cost(shape)[0] <= limit + 1e-6


def test_all_attentions_of_a_layer_are_in_the_same_bits():
    """`Quantize` takes a layer's attentions together: 4 bits for the harmless one alone would round the other, too."""
    generator = torch.Generator().manual_seed(0)
    names = ["decoder.0.self", "decoder.0.cross", "decoder.1.self", "decoder.1.cross"]
    blocks = {name: block(name, 4, True, generator) for name in names}
    losses = Distances(
        layers={"decoder": {2: ((0, 1), 0.0)}},
        four_bits={"decoder.0.self": 0.0, "decoder.0.cross": 9.0, "decoder.1.self": 1.0, "decoder.1.cross": 1.0},
        tokens={0: 0.0},
    )
    prices = Prices(blocks, {"decoder": 2}, Sizes(of_token=0, tokens=0, token_bytes=0.0, bits=8, bytes=3000.0))
    full = prices.cost(Program(blocks, losses, prices, Options(may_go=frozenset())).smallest("bytes"))[0]
    saved = sum(prices.of_block(blocks[name], 4, 8)[0] - prices.of_block(blocks[name], 4, 4)[0] for name in names) / 4
    shape, loss = Program(blocks, losses, prices, Options(bits=(8, 4), may_go=frozenset())).solve(full - saved, None)
    assert [shape.bits[name] for name in names] == [8, 8, 4, 4]
    assert loss == pytest.approx(2.0)
    assert prices.cost(shape)[0] == pytest.approx(full - 2 * saved)


@pytest.mark.parametrize(("units", "multiple"), [(1536, 8), (64, 8), (1536, 64), (256, 64), (128, 64)])
def test_neurons_stay_in_multiples(units, multiple):
    ffn = block("encoder.0.ffn", units, False, torch.Generator().manual_seed(0))
    found = levels(ffn, Options(multiple=multiple))
    assert found[0] == units
    assert len(found) == len(set(found)) > 1
    assert all(count % multiple == 0 for count in found)


def test_prices_of_time_are_those_of_the_measured_shapes():
    generator = torch.Generator().manual_seed(0)
    blocks = {"encoder.0.ffn": block("encoder.0.ffn", 8, False, generator)}
    options = Options()
    sizes = Sizes(of_token=0, tokens=0, token_bytes=0.0, bits=8, bytes=3000.0)
    plain = Prices(blocks, {"encoder": 1}, sizes)
    whole = Program(blocks, Distances(layers={"encoder": {1: ((0,), 0.0)}}, tokens={0: 0.0}), plain, options).smallest(
        "ms"
    )
    half = type(whole)(layers=whole.layers, units={"encoder.0.ffn": 4}, bits=whole.bits, tokens=0)
    full = type(whole)(layers=whole.layers, units={"encoder.0.ffn": 8}, bits=whole.bits, tokens=0)
    prices = Prices(blocks, {"encoder": 1}, sizes, [(full, 3.0), (half, 2.0)])
    assert prices.cost(full)[1] == pytest.approx(3.0)
    assert prices.cost(half)[1] == pytest.approx(2.0, rel=1e-6)


def test_blocks_name_all_attentions_and_ffns(encoder):
    model, tokenizer = BertModel.from_pretrained(encoder).eval(), wordpiece(texts())
    blocks = blocks_of(model, samples_of(model, texts(), tokenizer))
    assert {name: (one.kind, one.units) for name, one in blocks.items()} == {
        "encoder.0.self": ("heads", 4),
        "encoder.1.self": ("heads", 4),
        "encoder.0.ffn": ("neurons", 128),
        "encoder.1.ffn": ("neurons", 128),
    }
    for one in blocks.values():
        assert list(one.losses) == sorted(one.losses)
        assert Block(**json.loads(json.dumps(asdict(one)))).kept(2) == one.kept(2)


def test_a_layer_has_the_price_of_its_graph(encoder, tmp_path):
    """In ONNX, where the nodes of a small layer take more than its weights."""
    model = AutoModel.from_pretrained(encoder)
    sizes = {}
    for name, variant in {"two": model, "one": make_variant(model, [LayerSelection(keep={"encoder": [0]})])}.items():
        for each in (variant, AutoTokenizer.from_pretrained(encoder)):
            each.save_pretrained(tmp_path / name)
        sizes[name] = bytes_of(serve(tmp_path / name, "onnx", "int8", tmp_path / f"served-{name}"))
    blocks = blocks_of(model, samples_of(model, texts(30), AutoTokenizer.from_pretrained(encoder)))
    shape = replace(full_shape({"encoder": 2}, blocks, 8), tokens=model.config.vocab_size)
    found = sizes_of(model, shape.tokens, {"encoder": 2}, tmp_path / "served-two", sizes["two"], ENGINES["onnx"])
    prices = Prices(blocks, {"encoder": 2}, found)
    assert prices.cost(shape)[0] == pytest.approx(sizes["two"])
    assert prices.cost(replace(shape, layers={"encoder": (0,)}))[0] == pytest.approx(sizes["one"], rel=0.07)


def test_fewer_layers_are_not_measured_past_a_loss_that_is_of_no_use(encoder, tmp_path):
    served = opened(encoder)
    torch.manual_seed(0)
    served = replace(
        served, model=BertModel(BertConfig(**served.model.config.to_dict() | {"num_hidden_layers": 3})).eval()
    )
    samples = batches_of(served, texts(30))
    subject = Subject(served, samples, samples.batches)
    every = layer_distances(subject, "encoder", str)
    assert list(every) == [3, 2, 1]
    assert 0 < every[2][1] < every[1][1]
    told = []
    assert layer_distances(subject, "encoder", told.append, every[2][1] / 2) == {
        depth: every[depth] for depth in (3, 2)
    }
    assert told == ["encoder: 2 of 3 layers"]


def test_the_budget_is_met_by_one_that_was_stopped_and_a_finished_one_is_read_again(encoder, tmp_path):
    steps, folder = [], tmp_path / "small"

    def stop(step):
        steps.append(step)
        return len(steps) == 4

    console = Console(record=True, width=300)
    settings = {"texts": texts(), "budget": Budget(max_bytes="45%"), "out": folder, "engine": "torch", "heal": 0}
    with pytest.raises(Stopped, match="the same call goes on from there"):
        hf_freeze.compress(encoder, callback=stop, console=console, **settings)
    assert "going on" not in console.export_text(clear=False)
    assert "Stopped" in (folder / "report.html").read_text()
    done = json.loads((folder / "phases.json").read_text())["results"]
    result = hf_freeze.compress(encoder, console=console, **settings)
    said = console.export_text()
    assert f"going on with what {folder} has" in said
    assert "; measured and refitted on " in said
    after = json.loads((folder / "phases.json").read_text())["results"]
    assert done
    assert all(after[name] == value for name, value in done.items())
    assert result.after.bytes <= 0.45 * result.original_bytes
    assert 0.3 < result.after.fidelity.score < 1
    assert "%" in result.kept or "layers" in result.kept
    for name in ("report.html", "README.md", "report.png", "compressed.json"):
        assert (folder / name).stat().st_size > 200
    assert "Fidelity to the original" in (folder / "report.html").read_text()
    again = hf_freeze.compress(encoder, callback=steps.append, **settings)
    assert (again.after, again.kept) == (result.after, result.kept)
    with pytest.raises(ValueError, match=r"min_fidelity=1: the compressed model in .* has 0\.\d+ on held-out texts"):
        hf_freeze.compress(encoder, min_fidelity=1.0, **settings)


def test_what_was_measured_is_not_planned_again(encoder, tmp_path, monkeypatch):
    planned, plan = [], Progress.plan
    monkeypatch.setattr(Progress, "plan", lambda self, steps: (planned.append(steps), plan(self, steps)))
    settings = {"texts": texts(), "budget": Budget(max_bytes="75%"), "out": tmp_path / "small", **FEW_PARTS}
    measured = []

    def stop(step):
        measured.extend([step.text] if step.phase == "measuring" else [])
        return len(measured) == 3  # after both measurements of neurons

    with pytest.raises(Stopped):
        hf_freeze.compress(encoder, callback=stop, **settings)
    first = planned.pop(0)
    hf_freeze.compress(encoder, **settings)
    assert planned[0] == first - 2


def test_another_budget_uses_what_was_measured_for_the_first(encoder, tmp_path):
    said = {name: [] for name in ("first", "second", "alone")}

    def compressed(name, folder, budget):
        console = Console(file=io.StringIO(), width=300)
        result = hf_freeze.compress(
            encoder, texts=texts(), budget=budget, out=tmp_path / folder, engine="torch", heal=0, console=console
        )
        said[name] = [line for line in console.file.getvalue().splitlines() if line.startswith("measuring: ")]
        return result

    compressed("first", "small", Budget(max_bytes="45%"))
    second = compressed("second", "small", Budget(max_bytes="60%"))
    alone = compressed("alone", "alone", Budget(max_bytes="60%"))
    measured = {line.split(" (about")[0] for line in said["first"]}
    assert measured
    assert not measured & {line.split(" (about")[0] for line in said["second"]}
    assert len(said["second"]) < len(said["alone"])
    assert (second.kept, second.after.bytes, second.after.fidelity) == (
        alone.kept,
        alone.after.bytes,
        alone.after.fidelity,
    )
    with pytest.raises(ValueError, match=r"holds another compression \(times was False, now True\)"):
        compressed("second", "small", Budget(max_ms="50%"))


def test_only_a_shape_within_the_budget_is_healed(encoder, tmp_path, monkeypatch):
    healed, sizes, original = [], [], bytes_of(encoder)

    def size_of(folder):
        if folder.name.endswith("-unhealed"):
            sizes.append(folder.name)
            if len(sizes) == 1:
                return original + 1
        return bytes_of(folder)

    def heal(variant, *_, **options):
        healed.append(options["limit"])
        return Healed(loss_before=2e-5, loss_after=2e-5)

    monkeypatch.setattr(bench, "bytes_of", size_of)
    monkeypatch.setattr(maker, "heal", heal)
    settings = {
        "budget": Budget(max_bytes="90%"),
        "out": tmp_path / "small",
        "engine": "torch",
        "keep_vocabulary": True,
    }
    result = hf_freeze.compress(encoder, texts=texts(), heal="1epoch", **settings)
    assert len(set(sizes)) == 2
    assert not (tmp_path / "small" / "engine" / sizes[-1]).exists()
    assert not list((tmp_path / "small").glob(f"model-{result.shape.digest}-*"))
    assert healed == ["1epoch"]
    assert f"served-{result.shape.digest}" == result.after.folder.name
    table = (tmp_path / "small" / "README.md").read_text()
    assert "Not healed: it gives the outputs of the original already (held-out loss 2e-05)." in table


@pytest.fixture(scope="module")
def graphs():
    """Of the encoder as it is, by the names of its parts: traced once for all tests that export it."""
    return {}


@pytest.fixture
def traced_once(graphs, monkeypatch):
    trace_once(graphs, monkeypatch)


def test_what_the_engine_alone_reaches_is_not_cut(encoder, traced_once, tmp_path):
    command = ["compress", str(encoder), "--out", str(tmp_path / "small"), "--max-bytes", "99%", "--texts"]
    (tmp_path / "texts.txt").write_text("\n".join(texts()))
    found = CliRunner().invoke(app, [*command, str(tmp_path / "texts.txt")])
    assert found.exit_code == 0, found.output
    assert "nothing is cut" in found.output
    assert json.loads((tmp_path / "small" / "compressed.json").read_text())["model"] is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"texts": ["a dog"] * 3}, r"3 texts: give at least 16"),
        ({"engine": "tflite"}, r"unknown engine 'tflite'; choose from"),
        ({"heal": "soon"}, r"heal='soon': give 0, a time"),
        (
            {"budget": Budget(max_loss=1e-9), "engine": "onnx"},
            r"max_loss=1e-09: the whole model in onnx loses \d+\.\d+ points",
        ),
    ],
)
def test_wrong_settings_are_refused(encoder, traced_once, tmp_path, settings, message):
    defaults = {"texts": texts(), "budget": Budget(max_bytes="45%"), "engine": "torch", "heal": 0}
    with pytest.raises(ValueError, match=message):
        hf_freeze.compress(encoder, out=tmp_path / "small", **defaults | settings)
    if "heal" in settings:
        assert not (tmp_path / "small").exists(), "it is refused before anything is measured"


def test_what_is_out_of_reach_is_refused_and_another_compression_is_not_overwritten(encoder, tmp_path):
    defaults = {"budget": Budget(max_bytes=2000), "out": tmp_path / "small", **FEW_PARTS}
    least = r"out of reach: the smallest shape .* needs about .*; give it at least that, and more"
    with pytest.raises(ValueError, match=least):
        hf_freeze.compress(encoder, texts=texts(), **defaults)
    done = json.loads((tmp_path / "small" / "phases.json").read_text())["results"]
    assert "blocks" in done
    assert not any(phase.startswith(("layers", "order", "factor")) for phase in done)  # they would last for minutes
    with pytest.raises(ValueError, match=r"holds another compression \(of other inputs\); choose another --out"):
        hf_freeze.compress(encoder, texts=texts(61), **defaults)


def test_the_time_left_is_that_of_the_measurements_so_far(monkeypatch):
    now, said = [0.0], []
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    told = Progress(said.append, None, lambda: None)
    told.plan(3)
    for text, seconds in (("a", 10), ("b", 20)):
        told.step(text)
        now[0] += seconds
    told.tell("engine", "exporting")
    now[0] += 500  # counts for no measurement
    told.plan(2)
    told.step("c")
    assert said == [
        "measuring: a",
        "measuring: b (about 20 s of measuring left)",
        "exporting",
        "measuring: c (about 45 s of measuring left)",
    ]
    assert (told.last.share, told.last.seconds_left) == (2 / 5, 45)


@pytest.mark.parametrize("engine", ["torch", pytest.param("onnx", marks=pytest.mark.skipif(not ALL, reason=_TRACES))])
def test_the_nearest_that_a_refusal_names_is_met(encoder, tmp_path, engine):
    """In ONNX, the graph of a small model takes more than its weights, and estimates are rougher."""
    options = {"texts": texts(), "heal": 0, "native": False, "keep_vocabulary": True, "engine": engine}
    with pytest.raises(ValueError, match="out of reach") as refused:
        hf_freeze.compress(encoder, budget=Budget(max_bytes=2000), out=tmp_path / "small", **options)
    size = read_bytes(re.search(r"needs about ([\d.,]+ kB)", str(refused.value))[1].replace(",", ""))
    made = hf_freeze.compress(encoder, budget=Budget(max_bytes=size), out=tmp_path / "nearest", **options)
    assert bytes_of(made.after.folder) <= size


def test_time_that_is_out_of_reach_is_named_as_it_was_measured(encoder, tmp_path, monkeypatch):
    monkeypatch.setattr(Stopwatch, "milliseconds", lambda self, folders, unit=None: dict.fromkeys(folders, 2.0))
    with pytest.raises(ValueError, match=r"budget of 1 ms is out of reach: the smallest shape \(.*\) needs about 2 ms"):
        hf_freeze.compress(encoder, texts=texts(), budget=Budget(max_ms=1.0), out=tmp_path / "small", **FEW_PARTS)


def test_texts_to_compare_on_are_never_learnt():
    inputs = Inputs.of([f"text {number}" for number in range(100)], 1)
    parts = [inputs.learnt, inputs.dev, inputs.test]
    assert [len(part) for part in parts] == [60, 20, 20]
    assert len({text for part in parts for text in part}) == 100


def test_the_command_wants_texts_or_labels(tmp_path):
    found = CliRunner().invoke(app, ["compress", "x", "--out", str(tmp_path), "--max-bytes", "1MB"])
    assert found.exit_code == 2
    assert "give --texts, or --data with labels" in found.output


def test_the_command_wants_a_limit(tmp_path):
    found = CliRunner().invoke(app, ["compress", "x", "--out", str(tmp_path), "--texts", str(tmp_path / "a.txt")])
    assert found.exit_code == 2
    assert "give --max-bytes, --max-ms or --max-loss, or --front" in found.output


def test_bytes_are_fewest_for_a_loss(encoder, tmp_path, monkeypatch):
    monkeypatch.setattr(story, "_HALVINGS", 2)
    found = []
    for loss in (0.5, 30):
        settings = {"budget": Budget(max_loss=loss), "out": tmp_path / str(loss), **FEW_PARTS}
        found.append(hf_freeze.compress(encoder, texts=texts(), **settings))
        assert found[-1].loss <= loss
    assert found[1].after.bytes < found[0].after.bytes <= found[0].whole.bytes


def test_a_front_goes_from_the_whole_to_the_smallest(encoder, tmp_path):
    (tmp_path / "texts.txt").write_text("\n".join(texts()))
    command = ["compress", str(encoder), "--texts", str(tmp_path / "texts.txt"), "--heal", "0", "--native"]
    found = CliRunner().invoke(app, [*command, "--front", "3", "--out", str(tmp_path / "front")])
    assert found.exit_code == 0, found.output
    lines = [line for line in (tmp_path / "front" / "front.md").read_text().splitlines() if line.startswith("| ")]
    sizes = [float(line.split("|")[2].split()[0].replace(",", "")) for line in lines[2:]]
    assert len(sizes) >= 3
    assert sizes == sorted(sizes, reverse=True)
    assert (tmp_path / "front" / "report.png").stat().st_size > 1000
    again = CliRunner().invoke(app, [*command, "--front", "3", "--max-bytes", "1MB", "--out", str(tmp_path / "front")])
    assert "--front chooses the sizes itself" in again.output


def test_a_native_model_needs_no_code_of_ours(encoder, tmp_path):
    settings = {"budget": Budget(max_bytes="70%"), "heal": 0, "native": True}
    result = hf_freeze.compress(encoder, texts=texts(), out=tmp_path / "small", **settings)
    config = json.loads((result.after.folder / "config.json").read_text())
    assert config["model_type"] == "bert"
    assert "auto_map" not in config
    assert config["intermediate_size"] % 64 == 0
    AutoModel.from_pretrained(result.after.folder)


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    folder = tmp_path_factory.mktemp("translator")
    torch.manual_seed(0)
    tokenizer = word_level(())
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = MarianConfig(
        **sizes,
        vocab_size=len(tokenizer),
        d_model=16,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
        init_std=1.0,
    )
    MarianMTModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_tokens_that_a_translator_writes_are_kept(translator, tmp_path):
    """Texts of the source language alone must not cost the target language its tokens."""
    tokenizer = AutoTokenizer.from_pretrained(translator)
    compression = Compression(
        str(translator), ["a dog"] * 40, Budget(max_bytes="80%"), tmp_path / "out", Settings(engine="torch")
    )
    written = batches_of(compression.original.served, compression.inputs.learnt).batches
    tokens = {token for batch in written for token in batch["decoder_input_ids"].unique().tolist()}
    read = count_tokens(tokenizer, ["a dog"])
    assert any(not read[token] for token in tokens)
    assert all(compression.original.counts[token] for token in tokens)


def test_fewer_tokens_are_learnt_from_what_the_translator_wrote_with_all(translator, tmp_path):
    """Nothing can be learnt from the answers of a model that splits texts as it never did."""
    compression = Compression(
        str(translator), texts(), Budget(max_bytes="80%"), tmp_path / "out", Settings(engine="torch")
    )
    original = compression.original
    trimmed = original.subject(original.sizes([0.9])[0])
    assert original.teacher(original.subject(), 0.0) is original.model
    assert original.teacher(trimmed, 0.04) is trimmed.model
    assert original.teacher(trimmed, 0.06) is None
    wanted = sorted(" ".join(answer["text"].split()) for answer in original.expected("dev_subset").items)
    pad = trimmed.tokenizer.pad_token_id
    labels = [row for batch in trimmed.held_out for row in batch["labels"].masked_fill(batch["labels"] < 0, pad)]
    found = [
        " ".join(trimmed.tokenizer.decode(row, skip_special_tokens=True).removeprefix("<s>").split()) for row in labels
    ]
    lost = set(original.served.tokenizer.get_vocab()) - set(trimmed.tokenizer.get_vocab())
    assert lost & {word for text in wanted for word in text.split()}
    assert sorted(found) == sorted(" ".join(word for word in text.split() if word not in lost) for text in wanted)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--texts", "x", "--label", "y"], "--label is for --data: leave it out"),
        (["--texts", "x", "--hours", "1"], "--hours is gone: there are no trial trainings"),
        (["--data", "x", "--min-score", "1"], "--min-score is gone: give --max-loss"),
        (["--data", "x", "--smoke"], "--smoke is gone: there are no trial trainings"),
    ],
)
def test_options_of_the_other_way_are_refused(tmp_path, given, message):
    found = CliRunner().invoke(app, ["compress", "x", "--out", str(tmp_path), "--max-bytes", "1MB", *given])
    assert found.exit_code == 2
    assert message in found.output


def test_few_tokens_are_said_once_and_other_warnings_as_ever():
    said = []

    def warn():
        with _few_tokens_said_once(said.append):
            for text in ("few tokens: 'first' has seen 7", "few tokens: 'second' has seen 7", "of another kind"):
                warnings.warn(text, stacklevel=1)

    with pytest.warns(UserWarning, match="of another kind"):
        warn()
    assert said == ["few tokens: 'first' has seen 7"]
