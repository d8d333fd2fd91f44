"""`compress --layer-by-layer`: language models larger than the memory."""

import json
import os
import re
import shutil
from importlib.util import find_spec

import pytest
import torch
from publish.test_export_gguf import TEXTS as GGUF_TEXTS
from publish.test_export_gguf import random_model, tokenizer_for
from safetensors.torch import load_file, save_file
from support.recipes import cli, one_line_error
from support.text import words
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from hf_freeze import make_variant, methods
from hf_freeze.compression import Budget, compress, large
from hf_freeze.compression.large import compress_large
from hf_freeze.compression.layer_costs import layer_costs
from hf_freeze.install import MissingExtra
from hf_freeze.io import bytes_of
from hf_freeze.model.finished_layers import FinishedLayers
from hf_freeze.model.loading import load_model
from hf_freeze.model.paging import Paged
from hf_freeze.model.samples import samples_of

LAYERS, IDLE, WIDTH = 5, (1, 3), 80
DEAD, TWINS = range(12), {20 + number: 40 + number for number in range(12)}  # neuron -> the one that it is a copy of
TEXTS = [
    " ".join(f"w{int(token)}" for token in torch.randint(3, 60, (12,), generator=torch.Generator().manual_seed(number)))
    for number in range(120)
]


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """The folder of a Llama with two idle layers, in which 30 % of the neurons of the others are dead or copies."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = LlamaConfig(vocab_size=60, max_position_embeddings=64, num_key_value_heads=2, **sizes, **special)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for number, layer in enumerate(model.model.layers):
            if number in IDLE:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
                continue
            layer.mlp.down_proj.weight[:, list(DEAD)] = 0
            for linear in (layer.mlp.gate_proj, layer.mlp.up_proj):
                linear.weight[list(TWINS)] = linear.weight[list(TWINS.values())]
    folder = tmp_path_factory.mktemp("planted") / "model"
    model.save_pretrained(folder, max_shard_size="50KB")
    words(60, pad=0).save_pretrained(folder)
    return folder


def compressed(folder, out, share, **options):
    return compress_large(folder, texts=TEXTS, max_bytes=share, out=out, samples=64, **options)


def test_a_planted_structure_is_found_and_its_loss_is_nothing(planted, tmp_path):
    shape = {f"layers.{layer}.mlp": WIDTH - len(DEAD) - len(TWINS) for layer in range(LAYERS)}
    whole = sum(parameter.numel() for parameter in load_model(planted).parameters())
    layer = sum(p.numel() for p in load_model(planted).model.layers[0].parameters())
    gone = len(IDLE) * layer + (LAYERS - len(IDLE)) * 3 * 64 * (WIDTH - next(iter(shape.values())))
    share = f"{100 * (1 - 4 * gone / bytes_of(planted)) + 2:.1f}%"
    assert gone / whole > 0.45
    result = compressed(planted, tmp_path / "out", share, engine="torch")
    kept = next(iter(result.shape.layers.values()))
    assert kept == tuple(layer for layer in range(LAYERS) if layer not in IDLE)
    found = {m.name: m for m in load_model(result.model).methods}
    assert found.keys() == {"layer_selection", "ffn_pruning"}
    of_layers = [set(range(WIDTH)) - set(neurons) for neurons in found["ffn_pruning"].keep.values()]
    assert sum(map(len, of_layers)) >= 60  # of 72; the budget is 2 % above what they leave
    for removed in of_layers:
        assert removed <= {*DEAD, *TWINS, *TWINS.values()}
        assert not any(twin in removed and other in removed for twin, other in TWINS.items())
    assert result.fidelity.kl < 1e-5
    assert result.fidelity.agreement > 0.999


def test_costs_are_the_changes_of_the_states(planted, tmp_path):
    """Those of layers and bits against running the model, those of neurons against cutting them without a refit of others."""
    model, samples = load_model(planted).eval(), samples_of(load_model(planted), TEXTS, words(60, pad=0)).undivided()
    with Paged(tmp_path, 10**9) as paged:
        costs = layer_costs(load_model(planted).eval(), samples, paged)
    for (_, number), cost in costs.layers.items():
        layer, changes = model.model.layers[number], []
        layer.register_forward_hook(
            lambda module, args, kwargs, output, changes=changes: changes.append(_relative(args[0], output)),
            with_kwargs=True,
        )
        with torch.no_grad():
            for batch in samples.batches:
                model(**batch)
        assert cost == pytest.approx(sum(changes) / len(changes), rel=0.05)
    assert all(costs.layers["decoder", layer] == 0 for layer in IDLE)
    assert all(
        costs.bits[4][name] > 20 * costs.bits[8][name] for name in costs.bits[4] if name.split(".")[1] not in "13"
    )
    assert all(not any(block.losses[: len(DEAD)]) for block in costs.blocks.values() if block.place[1] in IDLE)


def _relative(before, after):
    return float(((after - before).square().sum(-1) / after.square().sum(-1)).mean())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("layer", [0, 2, 4])
def test_a_killed_call_resumes(layer, planted, tmp_path, monkeypatch):
    wanted = compressed(planted, tmp_path / "whole", "40%", engine="torch")
    append, calls = large.layer_costs.__globals__["_append"], []

    def dies(path, line):
        append(path, line)
        if line["block"]["name"] == f"decoder.{layer}.ffn":
            os._exit(7)

    if (child := os.fork()) == 0:
        large.layer_costs.__globals__["_append"] = dies
        compressed(planted, tmp_path / "out", "40%", engine="torch")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    monkeypatch.setitem(
        large.layer_costs.__globals__, "_append", lambda path, line: (calls.append(line), append(path, line))
    )
    result = compressed(planted, tmp_path / "out", "40%", engine="torch")
    assert {line["block"]["name"].split(".")[1] for line in calls} == {str(n) for n in range(layer + 1, LAYERS)}
    assert result.shape == wanted.shape
    assert result.fidelity.kl == pytest.approx(wanted.fidelity.kl, rel=1e-3, abs=1e-9)
    assert compressed(planted, tmp_path / "out", "40%", engine="torch").bytes == result.bytes


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_call_that_is_killed_while_it_cuts_resumes(planted, tmp_path):
    wanted, add, calls = compressed(planted, tmp_path / "whole", "40%", engine="torch"), FinishedLayers.add, []

    def dies(*args):
        add(*args)
        calls.append(args)
        if len(calls) > LAYERS:  # those of the statistics are finished
            os._exit(7)

    if (child := os.fork()) == 0:
        FinishedLayers.add = dies
        compressed(planted, tmp_path / "out", "40%", engine="torch")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert list((tmp_path / "out").glob(".model-*.part"))
    with pytest.raises(ValueError, match="holds another compression"):
        compress_large(planted, texts=TEXTS[1:], max_bytes="40%", out=tmp_path / "out", engine="torch", samples=64)
    result = compressed(planted, tmp_path / "out", "40%", engine="torch")
    assert result.shape == wanted.shape
    assert result.fidelity.kl == pytest.approx(wanted.fidelity.kl, rel=1e-3, abs=1e-9)


def test_folders_for_transformers_have_equal_widths_and_bits_of_their_own(planted, tmp_path):
    pytest.importorskip("compressed_tensors")
    result = compressed(planted, tmp_path / "out", "28%")
    assert bytes_of(result.folder) <= 0.28 * bytes_of(planted)
    config = json.loads((result.folder / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    page = (tmp_path / "out" / "README.md").read_text()
    assert "| decoder 1 | 0 |" in page
    assert "KL" in page
    (tmp_path / "text.txt").write_text("\n".join(TEXTS))
    scored = ["score", result.model, result.folder, "--perplexity", tmp_path / "text.txt", "--window", "16"]
    cli(*scored, "--out", tmp_path / "scores.json")
    of_variant, of_folder = json.loads((tmp_path / "scores.json").read_text())
    assert of_folder["score"] == pytest.approx(of_variant["score"], rel=1e-3)


def test_a_gguf_fills_its_budget_and_its_ffns_are_rounded(tmp_path):
    gguf = pytest.importorskip("gguf")
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 256}
    random_model("llama", **sizes).save_pretrained(tmp_path / "model")
    tokenizer_for("llama").save_pretrained(tmp_path / "model")
    texts = [" ".join(text.split()[number % 5 :]) for number in range(40) for text in GGUF_TEXTS[:3]]
    budget = 0.25 * bytes_of(tmp_path / "model")
    result = compress_large(
        tmp_path / "model", texts=texts, max_bytes=budget, out=tmp_path / "out", engine="gguf", samples=64
    )
    assert 0.9 * budget < bytes_of(result.folder) == result.bytes <= budget
    tensors = gguf.GGUFReader(result.folder / "model.gguf").tensors
    assert {t.tensor_type.name for t in tensors if ".ffn_" in t.name and len(t.shape) == 2} == {"Q8_0"}
    assert "Before its weights are rounded to q8_0" in (tmp_path / "out" / "README.md").read_text()


def test_healing_lowers_the_distance(planted, tmp_path):
    share = "9%"
    before = compressed(planted, tmp_path / "before", share, engine="torch")
    for int8 in (False, True):
        said: list[str] = []
        options = {"engine": "torch", "heal": "3epochs", "heal_int8": int8, "say": said.append}
        healed = compressed(planted, tmp_path / f"healed {int8}", share, **options)
        assert any(re.fullmatch(r"healing: step \d+ of \d+(, [1-9]\d* s left)?", line) for line in said)
        assert healed.shape == before.shape
        assert healed.fidelity.kl < before.fidelity.kl
        assert not any("lora" in name for name in load_file(next(healed.model.glob("*.safetensors"))))


def test_what_is_refused(planted, tmp_path):
    for share, engine, error in (
        ("8%", "torch", "is out of reach: the smallest shape"),
        ("50%", "onnx", "for models larger than the memory choose from"),
    ):
        with pytest.raises(ValueError, match=error):
            compressed(planted, tmp_path / engine, share, engine=engine)
    with pytest.raises(ValueError, match="heal='soon': give 0, a time as '10min'"):
        compressed(planted, tmp_path / "soon", "50%", heal="soon")
    with pytest.raises(ValueError, match="heal_int8=True with heal=0: nothing is healed; give heal="):
        compressed(planted, tmp_path / "soon", "50%", heal_int8=True)
    with pytest.raises(ValueError, match="8 texts: give at least 16"):
        compress_large(planted, texts=TEXTS[:8], max_bytes="50%", out=tmp_path / "few")
    compressed(planted, tmp_path / "out", "70%", engine="torch")
    with pytest.raises(ValueError, match="holds another compression"):
        compressed(planted, tmp_path / "out", "60%", engine="torch")
    bert = make_variant(
        LlamaConfig(**load_model(planted).config.to_dict()), [methods.FFNPruning(width=8)], task="feature-extraction"
    )
    bert.save_pretrained(tmp_path / "encoder")
    with pytest.raises(ValueError, match="only causal language models are compressed"):
        compress_large(tmp_path / "encoder", texts=TEXTS, max_bytes="50%", out=tmp_path / "x")


def test_a_folder_with_other_files_is_refused_and_nothing_in_it_is_removed(planted, tmp_path):
    (tmp_path / "model-of-mine").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(
        ValueError, match=r"holds other files, such as 'model-of-mine': choose a new or an empty folder"
    ):
        compressed(planted, tmp_path, "50%", engine="torch")
    assert {path.name for path in tmp_path.iterdir()} == {"model-of-mine", "notes.txt"}


def test_without_a_tokenizer_no_folder_is_made(planted, tmp_path):
    folder = shutil.copytree(planted, tmp_path / "model", ignore=shutil.ignore_patterns("token*"))
    with pytest.raises(ValueError, match="model has no tokenizer, which texts need"):
        compressed(folder, tmp_path / "out", "50%", engine="torch")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("engine", ["torch", "compressed-tensors", "gguf"])
def test_a_budget_below_the_tables_is_refused_before_the_pass(engine, planted, tmp_path, monkeypatch):
    monkeypatch.setattr(large, "layer_costs", None)
    with pytest.raises(ValueError, match=r"out of reach: embeddings and other parts outside of the layers alone take"):
        compressed(planted, tmp_path / "out", "2%", engine=engine)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("package", "options"), [("gguf", {"engine": "gguf"}), ("peft", {"heal": "1epoch"})])
def test_a_missing_package_is_said_before_the_pass(package, options, planted, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_freeze.install.find_spec", lambda name: None if name == package else find_spec(name))
    with pytest.raises(MissingExtra, match=f"needs the package {package}, which is missing; from a clone: pip install"):
        compressed(planted, tmp_path / "out", "50%", **options)
    assert not (tmp_path / "out").exists()


def test_experts_go_with_their_layers_within_the_budget(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = MixtralConfig(vocab_size=60, num_key_value_heads=2, num_local_experts=4, pad_token_id=0, **sizes)
    MixtralForCausalLM(config).save_pretrained(tmp_path / "model")
    words(60, pad=0).save_pretrained(tmp_path / "model")
    result = compressed(tmp_path / "model", tmp_path / "out", "60%", engine="torch")
    assert len(next(iter(result.shape.layers.values()))) == 2
    assert result.bytes <= 0.6 * bytes_of(tmp_path / "model")


def test_weights_that_are_not_finite_are_named(planted, tmp_path):
    folder = tmp_path / "bad"
    folder.mkdir()
    for path in planted.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if "model.layers.2.mlp.up_proj.weight" in tensors:
            tensors["model.layers.2.mlp.up_proj.weight"][3, 3] = float("nan")
            save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"the inputs or outputs of 'layers\.2\.mlp\.down_proj' cannot be used"):
        compressed(folder, tmp_path / "out", "40%", engine="torch")


def test_the_command(planted, tmp_path):
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    command = ["compress", planted, "--layer-by-layer", "--out", tmp_path / "out"]
    texts = ["--texts", tmp_path / "texts.txt"]
    printed = cli(*command, *texts, "--max-bytes", "60%", "--engine", "torch", "--samples", "64").output
    assert "layer 4 (5 of 5): " in printed
    assert printed.rstrip().endswith(f"Written: {next((tmp_path / 'out').glob('model-*'))}.")
    assert "texts that nothing was chosen by: KL" in printed
    assert (tmp_path / "out" / "kept.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name[:6] for path in (tmp_path / "out").iterdir() if "-" in path.name] == ["model-"]
    assert json.loads((tmp_path / "out" / "compressed.json").read_text())["bytes"] < 0.6 * bytes_of(planted)
    error = one_line_error(*command, *texts, "--max-ms", "5")
    assert "--max-ms: not with --layer-by-layer, which takes --texts and --max-bytes" in error
    error = one_line_error("compress", planted, "--out", tmp_path / "out", *texts, "--max-bytes", "60%", "--heal-int8")
    assert "--heal-int8 is for weights in files: give --layer-by-layer, or leave it out" in error
    assert "is no folder with a model" in one_line_error(
        "compress", tmp_path / "none", "--layer-by-layer", "--out", tmp_path / "o", *texts, "--max-bytes", "5MB"
    )


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(planted, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_freeze.compression.compression.available", lambda: 10**5)
    with pytest.raises(
        ValueError, match=r"takes 0\.0 GB of memory in fp32, and 0\.0 GB are free: give --layer-by-layer"
    ):
        compress(planted, texts=TEXTS, budget=Budget(max_bytes="50%"), out=tmp_path / "out")
