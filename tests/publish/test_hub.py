"""Pushing to a Hub of this machine over real HTTP, loading from it in a fresh process, cards, and what goes wrong."""

import contextlib
import inspect
import io
import json
import re
import shutil
import threading

import pytest
import torch
import transformers.utils.hub
from huggingface_hub import ModelCard, constants
from safetensors.torch import load_file, save_file
from support.cases import native_config, once, plain
from support.hub import Hub
from support.models import build, native
from support.processes import printed_by
from support.recipes import write_recipe
from support.small import small_config
from support.tokenizers_of_each_kind import wordpiece
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertModel, PreTrainedModel
from typer.testing import CliRunner

from hf_freeze import make_variant, methods, stored_bytes
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.cli import app
from hf_freeze.lab.recipes.load import load_recipe
from hf_freeze.lab.runs.grid import run_grid
from hf_freeze.model.build import VariantMixin
from hf_freeze.model.loading import empty_model
from hf_freeze.publish.cards import model_card, read_trained_model, shortened
from hf_freeze.publish.export.served import served_fidelity
from hf_freeze.publish.hub import assemble, check_whole, push, push_model
from hf_freeze.publish.trimming import trim_model

TOKEN = "hf_loopback"


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """Two finished runs: row 0, and row 2.1 with random attention."""
    folder = tmp_path_factory.mktemp("grid")
    run_grid(load_recipe(write_recipe(folder / "recipe.yaml")), folder / "runs", command="hf-freeze run recipe.yaml")
    return folder / "runs"


@pytest.fixture
def loopback(tmp_path, monkeypatch):
    server = Hub(tmp_path / "hub", token=TOKEN)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    # It keeps the address that held when it was first used.
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


# For a new process: the address of the Hub and the folder of its cache.
AT_THE_HUB = """
import sys, torch
from huggingface_hub import constants
constants.ENDPOINT = sys.argv[1]
constants.HUGGINGFACE_CO_URL_TEMPLATE = sys.argv[1] + "/{repo_id}/resolve/{revision}/{filename}"
constants.HF_HUB_CACHE = sys.argv[2]
options = {"trust_remote_code": True}
"""


def test_a_pushed_run_translates_in_a_fresh_process(grid, loopback, tmp_path):
    """By the three lines of its own card."""
    folder = grid / "row-2.1-seed-1"
    push(folder, "me/tiny", private=True)
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert loopback.files("me/tiny") == names | {"README.md", "results.json"}
    assert json.loads((loopback.folder / "me/tiny/private").read_text()) is True
    card = ModelCard.load("me/tiny").text
    lines = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1]
    assert len(lines.strip().splitlines()) == 4  # an import, two lines and a print
    there = printed_by(AT_THE_HUB + lines, loopback.url, tmp_path / "cache", HF_TOKEN=TOKEN).strip().splitlines()[-1]
    with contextlib.redirect_stdout(io.StringIO()) as here:
        exec(lines.replace("me/tiny", str(folder / "model")), {})
    assert there == here.getvalue().strip().splitlines()[-1]
    assert "translation_text" in there
    assert (tmp_path / "cache" / "models--me--tiny").is_dir()


def test_a_card_says_what_the_run_left_and_nothing_else(grid):
    made = read_trained_model(grid / "row-2.1-seed-1")
    record = made.record
    card = model_card(made, "me/tiny", language=["de", "en"], license="mit")
    data = card.data.to_dict()
    assert data["library_name"] == "hf_freeze"
    assert data["pipeline_tag"] == "translation"
    assert data["language"] == ["de", "en"]
    assert data["license"] == "mit"
    assert {"hf_freeze", "freeze"} <= set(data["tags"])
    assert "base_model" not in data
    (entry,) = data["model-index"]
    values = {m["type"]: m["value"] for m in entry["results"][0]["metrics"]}
    assert values == {"sacrebleu": record["metrics"]["test_bleu"], "chrf": record["metrics"]["test_chrf"]}
    assert f"{record['parameters']['stored_bytes']:,} bytes" in card.text
    assert f"| BLEU | the built-in corpus of hf_freeze | {record['metrics']['test_bleu']:.1f} |" in card.text
    assert "`hf-freeze run recipe.yaml`" in card.text
    assert record["environment"]["torch"] in card.text
    assert "Row 0 of the same grid" in card.text
    assert '`{"attention": "random", "seed": 1}`' in card.text
    assert "https://arxiv.org/abs/2010.11859" in card.text
    # Every figure with decimals is one of the record, of row 0's, or of a version.
    known = json.dumps([record, json.loads((grid / "row-0-seed-1" / "metrics.json").read_text())])
    rounded = {f"{float(n):.{d}f}" for n in re.findall(r"\d+\.\d+", known) for d in (1, 2)} | {"2010.11859", "2.1"}
    versions = set(re.findall(r"\d+\.\d+", json.dumps(record["environment"]) + json.dumps(record["signatures"])))
    assert set(re.findall(r"\d+\.\d+", card.text)) <= rounded | versions


def test_a_card_that_was_written_without_a_name_gets_that_of_the_repository(grid, loopback, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(grid / "row-2.1-seed-1" / "model", folder)
    model_card(read_trained_model(folder)).save(folder / "README.md")
    push(folder, "me/named")
    card = ModelCard.load("me/named")
    assert card.data.model_name == "me/named"
    assert "# me/named\n" in card.text
    assert 'model="me/named"' in card.text
    assert "REPO_ID" not in str(card)


def test_long_lists_of_a_card_are_shortened_in_dicts_too():
    kept = {"decoder.0.ffn": list(range(40)), "decoder.1.ffn": [3, 5]}
    assert shortened({"keep": kept}) == {
        "keep": {"decoder.0.ffn": "[0, 1, 2, ..., 39] (40 in all)", "decoder.1.ffn": [3, 5]}
    }
    assert kept["decoder.0.ffn"] == list(range(40))


def test_other_seeds_and_folders_of_this_machine(grid, tmp_path):
    """The scores of other seeds stand beside; no absolute path goes out."""
    other = tmp_path / "runs"
    shutil.copytree(grid, other)
    again = other / "row-2.1-seed-2"
    shutil.copytree(other / "row-2.1-seed-1", again)
    record = json.loads((again / "metrics.json").read_text())
    (again / "metrics.json").write_text(
        json.dumps(record | {"seed": 2, "metrics": record["metrics"] | {"test_bleu": 98.7}})
    )
    settings = json.loads((other / "row-2.1-seed-1" / "run.json").read_text())
    settings["data"] = {"root": str(tmp_path / "multi30k"), "train": ["a.de", "a.en"], "test": ["t.de.gz", "t.en.gz"]}
    settings["backbone"] = {"pretrained": str(tmp_path / "mini")}
    command = f"hf-freeze run {tmp_path}/r.yaml --set backbone.pretrained={tmp_path}/mini --set 'seeds=[1, 2]'"
    (other / "command.txt").write_text(command)
    (other / "row-2.1-seed-1" / "run.json").write_text(json.dumps(settings))
    assemble(read_trained_model(other / "row-2.1-seed-1"), tmp_path / "out", "me/x")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "BLEU 98.7 with seed 2" in text
    assert "multi30k (t)" in text
    assert "`hf-freeze run r.yaml --set backbone.pretrained=mini --set 'seeds=[1, 2]'`" in text
    assert "from the weights of mini" in text
    (other / "command.txt").write_text(f"{command}\nhf-freeze run {tmp_path}/more.yaml\n")
    text = str(model_card(read_trained_model(other / "row-2.1-seed-1")))
    assert re.search(
        r"^- Commands of the grid of this model: `hf-freeze run r\.yaml .*`; `hf-freeze run more\.yaml`$", text, re.M
    )
    # As `hf-freeze init` writes it for one file, of which the test split is a part.
    settings["data"] = {"train": [str(tmp_path / "reviews.csv")], "holdout": 4, "holdout_test": 4}
    (other / "row-2.1-seed-1" / "run.json").write_text(json.dumps(settings))
    assemble(read_trained_model(other / "row-2.1-seed-1"), tmp_path / "of one file", "me/x")
    assert "- Data: reviews." in (tmp_path / "of one file" / "README.md").read_text()
    for folder in ("out", "of one file"):
        for name in ("README.md", "results.json"):
            assert str(tmp_path) not in (tmp_path / folder / name).read_text()


def test_a_card_without_a_record_has_no_figures_but_sizes(grid, tmp_path):
    shutil.copytree(grid / "row-0-seed-1" / "model", tmp_path / "alone")
    card = model_card(read_trained_model(tmp_path / "alone"))
    assert "model-index" not in card.data.to_dict()
    assert "Nothing is on record" in card.text
    assert "BLEU" not in card.text


@pytest.mark.parametrize("case", once(), ids=lambda case: case.id)
def test_every_method_has_a_card(case, tmp_path):
    model = build(case)
    model.save_pretrained(tmp_path)
    card = model_card(read_trained_model(tmp_path), "me/x")
    for method in case.methods:
        described = re.search(rf"- \*\*{type(method).__name__}\*\*\. (.+)\n +Settings: `({{.*}})`", card.text)
        assert described
        assert re.search(r"\(.*(et al|\d{4})", described[1])  # with its source
    assert card.data.pipeline_tag
    check_whole(tmp_path, empty_model(tmp_path))
    ast_lines = re.search(r"```python\n(.*?)```", card.text, re.DOTALL)[1]
    compile(ast_lines, "card", "exec")


def test_the_example_of_a_card_takes_an_image_where_the_model_does(tmp_path):
    make_variant(small_config("vit"), [methods.FFNPruning(width=16)], task="image-classification").save_pretrained(
        tmp_path
    )

    assert 'print(pipe("image.jpg"))' in str(model_card(read_trained_model(tmp_path)))


def test_the_example_of_a_card_without_a_pipeline_opens_the_model(tmp_path):
    config = native_config(ARCHITECTURES["bert"])
    make_variant(config, [methods.LowRank(rank=4)], task="multiple-choice").save_pretrained(tmp_path)
    text = str(model_card(read_trained_model(tmp_path), "me/x"))
    assert 'AutoModelForMultipleChoice.from_pretrained("me/x")' in text
    assert "pipeline(" not in text


def test_a_card_of_ones_own_is_taken(grid, tmp_path, loopback):
    shutil.copytree(grid / "row-0-seed-1", tmp_path / "run")
    written = CliRunner().invoke(app, ["card", str(tmp_path / "run"), "--language", "de"])
    assert written.exit_code == 0, written.output
    assert (tmp_path / "run" / "model" / "results.json").exists()
    path = tmp_path / "run" / "model" / "README.md"
    path.write_text(path.read_text() + "\nWritten by hand.\n")
    push(tmp_path / "run", "me/own")
    assert (loopback.folder / "me/own/main/README.md").read_text().endswith("Written by hand.\n")
    unchanged = (
        r"README.md is published as it is, and language, license would not change it: edit the file, or delete it"
    )
    with pytest.raises(ValueError, match=unchanged):
        push(tmp_path / "run", "me/own", language=["de"], license="mit")


def test_the_command_line_pushes_to_a_branch(grid, loopback):
    done = CliRunner().invoke(app, ["push", str(grid / "row-0-seed-1"), "me/tiny", "--revision", "half", "--public"])
    assert done.exit_code == 0, done.output
    assert "Pushed" in done.output
    assert loopback.files("me/tiny") == set()
    assert "model.safetensors" in loopback.files("me/tiny", "half")


def test_a_dry_run_lists_what_a_push_publishes(grid, loopback, monkeypatch):
    words = ["push", str(grid / "row-0-seed-1"), "me/dry", "--license", "mit"]
    with monkeypatch.context() as patched:
        patched.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")  # where nothing answers
        listed = CliRunner().invoke(app, [*words, "--dry-run"])
    assert listed.exit_code == 0, listed.output
    *lines, total = [line.split(maxsplit=1) for line in listed.output.splitlines()]
    assert not (loopback.folder / "me/dry").exists()
    CliRunner().invoke(app, words)
    pushed = loopback.folder / "me/dry/main"
    assert {name: int(size.replace(",", "")) for size, name in lines} == {
        path.relative_to(pushed).as_posix(): path.stat().st_size for path in pushed.rglob("*") if path.is_file()
    }
    assert total == [
        f"{sum(int(size.replace(',', '')) for size, _ in lines):,}",
        "bytes in all, for me/dry; nothing was pushed",
    ]


def test_push_to_hub_of_a_model_writes_a_card_once(loopback):
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=2
    )
    model = make_variant(config, [methods.Freeze(ffn="random", seed=1)], task="sequence-classification")
    native = set(inspect.signature(PreTrainedModel.push_to_hub).parameters)
    assert set(inspect.signature(push_model).parameters) >= native - {"self", "commit_description", "create_pr"}
    model.push_to_hub("me/bert", tags=["mine"], commit_message="first", commit_description="more", create_pr=False)
    card = ModelCard.load("me/bert")
    assert {"mine", "hf_freeze", "freeze"} <= set(card.data.tags)
    assert "**Freeze**" in card.text
    path = loopback.folder / "me/bert/main/README.md"
    path.write_text(path.read_text() + "\nBy hand.\n")
    model.push_to_hub("me/bert", private=True)
    assert path.read_text().endswith("By hand.\n")
    again = AutoModelForSequenceClassification.from_pretrained("me/bert")
    assert isinstance(again, VariantMixin)
    inputs = {"input_ids": torch.tensor([[1, 2, 3]])}
    torch.testing.assert_close(again.eval()(**inputs).logits, model.eval()(**inputs).logits)


def test_a_push_needs_no_import_of_the_room_that_writes_cards():
    code = """
import sys, unittest.mock
from hf_freeze.model.saving import SavingMixin
print("hf_freeze.publish.hub" in sys.modules)
with unittest.mock.patch("hf_freeze.publish.hub.push_model", print):
    SavingMixin.push_to_hub("model", "me/bert", sep=" to ")
"""
    assert printed_by(code).splitlines() == ["False", "model to me/bert"]


# -- what goes wrong -------------------------------------------------------------------------------------------------------------


def test_an_interrupted_upload_publishes_nothing_and_is_done_again(grid, loopback, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    loopback.faults["PUT lfs"] = ["cut"] * 50
    with pytest.raises(OSError, match="Nothing was published: push again"):
        push(grid / "row-0-seed-1", "me/tiny")
    assert loopback.files("me/tiny") == set()
    loopback.faults.clear()
    push(grid / "row-0-seed-1", "me/tiny")
    assert "model.safetensors" in loopback.files("me/tiny")


def test_a_passing_fault_of_the_server_is_waited_out(grid, loopback, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    loopback.faults["PUT lfs"] = [503, "cut"]
    push(grid / "row-0-seed-1", "me/tiny")
    assert loopback.seen.count("PUT lfs") == 3
    assert "model.safetensors" in loopback.files("me/tiny")


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"POST commit": [500] * 20}, "push again: nothing was published"),
        ({"POST commit": [409]}, "409"),
        ({"POST create": [403]}, "the token may not write there"),
        ({"POST create": ["cut"] * 20}, "cannot be reached .*nothing was published"),
    ],
)
def test_what_the_hub_refuses_is_one_line(faults, message, grid, loopback, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    loopback.faults = faults
    done = CliRunner().invoke(app, ["push", str(grid / "row-0-seed-1"), "me/tiny"])
    assert done.exit_code == 2
    assert re.search(message, " ".join(done.output.split())), done.output
    assert not loopback.faults or loopback.files("me/tiny") == set()


def test_a_wrong_token_is_one_line(grid, loopback, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(OSError, match="log in with `hf auth login`, or set HF_TOKEN"):
        push(grid / "row-0-seed-1", "me/tiny")
    assert not (loopback.folder / "me").exists()


def test_no_network_is_one_line(grid, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(ConnectionError, match=r"http://127\.0\.0\.1:9 cannot be reached"):
        push(grid / "row-0-seed-1", "me/tiny", token="hf_any")


def test_only_whole_models_are_pushed(grid, tmp_path, loopback):
    run = tmp_path / "run"
    shutil.copytree(grid / "row-0-seed-1", run)
    weights = run / "model" / "model.safetensors"
    whole = {name: tensor.clone() for name, tensor in load_file(weights).items()}
    name = "model.encoder.layers.0.fc1.weight"
    for message, tensors in (
        (f"{name!r} is not there", {n: t for n, t in whole.items() if n != name}),
        (rf"{name!r} has the shape \[1, 16\], not \[16, 16\]", whole | {name: whole[name][:1].clone()}),
    ):
        save_file(tensors, weights, {"format": "pt"})
        with pytest.raises(ValueError, match=message):
            push(run, "me/tiny")
    weights.write_bytes((grid / "row-0-seed-1" / "model" / "model.safetensors").read_bytes()[:-50])
    with pytest.raises(ValueError, match="truncated or damaged"):
        push(run, "me/tiny")
    weights.unlink()
    with pytest.raises(ValueError, match=r"no \*\.safetensors is there"):
        push(run, "me/tiny")
    (run / "metrics.json").unlink()
    with pytest.raises(ValueError, match="is not finished"):
        push(run, "me/tiny")
    with pytest.raises(ValueError, match="holds no model"):
        push(tmp_path, "me/tiny")
    with pytest.raises(ValueError, match="nosuch is not there: the folder of a model or of a finished run is needed"):
        push(tmp_path / "nosuch", "me/tiny")
    assert loopback.seen == []


# -- remote code -----------------------------------------------------------------------------------------------------------------

WITHOUT_US = """
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_freeze":
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Refuse())
from transformers import {auto}
model = {auto}.from_pretrained("me/remote", **options).eval()
assert "hf_freeze" not in sys.modules
print(model(**{inputs}).logits.flatten()[:5].tolist())
"""


@pytest.mark.parametrize(
    ("task", "applied"),
    [
        (
            "seq2seq-lm",
            [methods.Freeze(embeddings="random", attention="zero_diagonal", ffn="diagonal", seed=5)],
        ),
        ("sequence-classification", [methods.LayerSelection(share=0.5), methods.Freeze(ffn="random", seed=2)]),
    ],
    ids=["seeded", "fewer layers"],
)
def test_remote_code_needs_no_hf_freeze(applied, task, loopback, tmp_path):
    architecture = ARCHITECTURES["marian" if task == "seq2seq-lm" else "bert"]
    case = plain(architecture, task=task)
    model = make_variant(build(case), applied)
    inputs = case.batch()
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["labels"].clamp(min=0)
    model.save_pretrained(tmp_path / "model")
    push(tmp_path / "model", "me/remote", remote_code=True)
    assert "trust_remote_code=True" in ModelCard.load("me/remote").text
    values = {name: value.tolist() for name, value in inputs.items() if name != "labels"}
    given = "{" + ", ".join(f"{name!r}: torch.tensor({value})" for name, value in values.items()) + "}"
    code = AT_THE_HUB + WITHOUT_US.format(auto=case.auto_class.__name__, inputs=given)
    printed = printed_by(code, loopback.url, tmp_path / "cache")
    arguments = {name: torch.tensor(value) for name, value in values.items()}
    assert json.loads(printed) == model.eval()(**arguments).logits.flatten()[:5].tolist()


WITH_US = """
from transformers import AutoModelForSequenceClassification
model = AutoModelForSequenceClassification.from_pretrained("me/remote", **options).eval()
print(type(model).__name__, model(torch.tensor([[1, 2, 3]])).logits.tolist())
model.save_pretrained(sys.argv[3])
"""


def test_layers_of_ours_load_by_the_code_that_is_pushed_with_them(loopback, tmp_path):
    variant = make_variant(
        native_config(ARCHITECTURES["bert"]), [methods.LowRank(rank=4)], task="sequence-classification"
    )
    variant.eval().save_pretrained(tmp_path / "model")
    done = CliRunner().invoke(app, ["push", str(tmp_path / "model"), "me/remote", "--remote-code"])
    assert done.exit_code == 0, done.output
    card = ModelCard.load("me/remote").text
    assert "# needs hf_freeze, from a clone: pip install" in card
    assert 'pipeline("text-classification", model="me/remote", trust_remote_code=True)' in card
    assert "Loading it requires hf_freeze" in card

    def there():
        printed = printed_by(AT_THE_HUB + WITH_US, loopback.url, tmp_path / "cache", tmp_path / "again").split(" ", 1)
        assert printed[0] == type(variant).__name__
        assert json.loads(printed[1]) == variant(torch.tensor([[1, 2, 3]])).logits.tolist()

    there()
    pushed = loopback.files("me/remote")
    assert "modeling_hf_freeze.py" in pushed
    # Pushed again from what that program saved: neither asked for nor lost.
    source = (loopback.folder / "me/remote/main/modeling_hf_freeze.py").read_bytes()
    push(tmp_path / "again", "me/remote")
    assert loopback.files("me/remote") == pushed
    assert (loopback.folder / "me/remote/main/modeling_hf_freeze.py").read_bytes() == source
    there()


@pytest.mark.parametrize("name", ["push_to_hub", "save_pretrained"])
def test_a_model_is_pushed_with_its_code(name, loopback, tmp_path, monkeypatch):
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)  # made once, perhaps for another Hub
    variant = make_variant(native_config(ARCHITECTURES["bert"]), [methods.LowRank(rank=4)], task="masked-lm")
    if name == "push_to_hub":
        variant.push_to_hub("me/remote", remote_code=True)
        assert "trust_remote_code=True" in ModelCard.load("me/remote").text
    else:
        variant.save_pretrained(tmp_path / "model", push_to_hub=True, repo_id="me/remote", remote_code=True)
    assert "modeling_hf_freeze.py" in loopback.files("me/remote")
    assert "auto_map" in (loopback.folder / "me/remote/main/config.json").read_text()


def test_a_native_model_needs_no_code(tmp_path):
    build(plain(ARCHITECTURES["bert"], methods.LowRank(rank=4))).merge().save_pretrained(tmp_path / "model")
    assemble(read_trained_model(tmp_path / "model"), tmp_path / "out", "me/x", remote_code=True)
    assert not list((tmp_path / "out").glob("*.py"))
    assert "trust_remote_code" not in (tmp_path / "out" / "README.md").read_text()


def test_a_merged_model_says_what_was_done_to_it(tmp_path):
    """Also by an earlier merge, and only what this version knows."""
    first = build(plain(ARCHITECTURES["bert"], methods.LowRank(rank=4))).merge()
    variant = make_variant(first, [methods.LayerSelection(keep={"encoder": [1]})])
    variant.save_pretrained(tmp_path / "variant")
    assert model_card(read_trained_model(tmp_path / "variant"), "me/x").data.tags == [
        "hf_freeze",
        "low-rank",
        "layer-selection",
    ]
    second = variant.merge()
    second.config.merged_methods.append({"method": "of_tomorrow"})
    second.save_pretrained(tmp_path / "model")
    card = model_card(read_trained_model(tmp_path / "model"), "me/x")
    assert "with the methods below, and merged into a model that needs no hf_freeze" in card.text
    assert re.findall(r"- \*\*(\w+)\*\*\. .*\n  Settings: `(.*)`", card.text) == [
        ("LowRank", '{"rank": 4}'),
        ("LayerSelection", '{"keep": {"encoder": [1]}}'),
    ]
    assert card.data.tags == ["hf_freeze", "low-rank", "layer-selection"]
    assert card.data.library_name == "transformers"


def test_a_model_of_the_hub_is_trimmed(loopback, tmp_path):
    """With what sentence-transformers reads beside it; the card names it."""
    folder = tmp_path / "encoder"
    tokenizer = wordpiece(None)
    BertModel(BertConfig(**ARCHITECTURES["bert"].tiny | {"vocab_size": len(tokenizer)})).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    (folder / "modules.json").write_text("[]")
    push(folder, "me/encoder")
    out = trim_model("me/encoder", ["der hund schläft im garten"], out=tmp_path / "small")
    assert (out / "1_Pooling" / "config.json").is_file()
    assert len(AutoTokenizer.from_pretrained(out)) < len(tokenizer)
    assert ModelCard.load(out / "README.md").data.base_model == "me/encoder"
    BertModel(BertConfig(**ARCHITECTURES["bert"].tiny)).save_pretrained(tmp_path / "alone")
    push(tmp_path / "alone", "me/alone")
    with pytest.raises(ValueError, match="me/alone holds no tokenizer"):
        trim_model("me/alone", ["der hund"], out=tmp_path / "other")


def test_the_card_of_a_calibrated_variant_says_with_how_much(tmp_path):
    model = native(plain(ARCHITECTURES["llama"]))
    batches = [{"input_ids": torch.arange(3, 33).view(6, 5)}]
    make_variant(model, [methods.FFNPruning(width=8)], calibration=batches).save_pretrained(tmp_path)
    assert "Calibrated with 6 texts, 30 tokens, without labels." in str(model_card(read_trained_model(tmp_path)))
    make_variant(model, [methods.FFNPruning(width=8)]).save_pretrained(tmp_path)
    assert "Calibrated" not in str(model_card(read_trained_model(tmp_path)))


def test_a_card_compares_the_answers_with_those_of_the_original(grid, tmp_path):
    texts, models = tmp_path / "texts.txt", [grid / f"row-{row}-seed-1" / "model" for row in ("0", "2.1")]
    texts.write_text("simdi homor\nnukostu pyhiz\niki gum naz rivekzi\n")
    words = ["card", str(models[1]), "--out", str(tmp_path / "README.md"), "--compared-with", str(models[0])]
    done = CliRunner().invoke(app, [*words, "--texts", str(texts)])
    assert done.exit_code == 0, done.output
    found = served_fidelity(models[0], models[1], texts.read_text().splitlines())
    low, high = found.intervals["score"]
    text = (tmp_path / "README.md").read_text()
    assert "Answers beside those of the original, on 3 texts:" in text
    assert f"| fidelity of this model to the original, 0 to 1 | {found.score:.4f} | {low:.4f} to {high:.4f} |" in text
    sizes = [stored_bytes(empty_model(model)) for model in models]
    assert f"{sizes[1]:,} bytes of tensors, {sizes[1] / sizes[0]:.1%} of the {sizes[0]:,} of the original" in text
    assert "--compared-with and --texts go together" in CliRunner().invoke(app, words).output
    done = CliRunner().invoke(app, [*words, "--texts", str(texts), "--base-model", "me/whole", "--force"])
    assert done.exit_code == 0, done.output
    assert "Answers beside those of me/whole, on 3 texts:" in (tmp_path / "README.md").read_text()


def test_an_edited_card_is_replaced_with_force_alone(grid, tmp_path):
    written = tmp_path / "README.md"
    words = ["card", str(grid / "row-2.1-seed-1"), "--out", str(written)]
    for further in ([], [], ["--license", "mit"]):  # of what was not edited, nothing is lost
        done = CliRunner().invoke(app, [*words, *further])
        assert done.exit_code == 0, done.output
    edited = written.read_text() + "\nMy own words.\n"
    written.write_text(edited)
    refused = CliRunner().invoke(app, [*words, "--license", "mit"])
    assert refused.exit_code == 2
    assert "is there, edited or written with options: --force replaces it" in " ".join(refused.output.split())
    assert written.read_text() == edited
    assert CliRunner().invoke(app, [*words, "--force"]).exit_code == 0
    assert "My own words" not in written.read_text()
