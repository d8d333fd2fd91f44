"""Every code block of every page works: Python runs, commands are what the program takes, YAML is a recipe."""

import ast
import codeop
import importlib.util
import re
import shutil
from dataclasses import replace

import huggingface_hub.constants
import pytest
from support import ROOT
from support.pages import Block, blocks_of, check_page, is_worked_example, walk
from support.recipes import TINY, write_recipe
from transformers import BertConfig, BertForSequenceClassification, MarianConfig, MarianMTModel

from hf_freeze.lab import data
from hf_freeze.lab.recipes.expand import expand
from hf_freeze.lab.recipes.load import load_recipe
from hf_freeze.lab.runs.execute import execute

TOURS = ROOT / "docs" / "tour.md"
PAGES = {
    str(page.relative_to(ROOT)): page
    for pattern in ("*.md", "docs/**/*.md", "recipes/**/*.md", "model_cards/**/*.md")
    for page in sorted(ROOT.glob(pattern))
    if "```" in page.read_text(encoding="utf-8") and page != TOURS
}
LESS = {  # what the tours say -> what is run here, in seconds
    "hf-freeze run ": "hf-freeze run --smoke --set data.limit=100 --set data.builtin.test=40 ",
    "train=2000": "train=200",
    "--heal 0": "--heal 0 --samples 32",
    "--data freeze_ablation": "--data freeze_ablation --set data.limit=20",
}
TRANSLATOR = re.compile(r"Helsinki-NLP/[\w-]+")
CLASSIFIER = re.compile(r"textattack/bert-base-uncased-SST-2|(?<!/)bert-base-uncased")
OTHER_TOOLS = ("sentence_transformers", "trl")
RUN = re.compile(r"runs/(?:[\w-]+/)row-[\w.-]+-seed-\d+")  # a folder that a grid wrote
PUBLISHED = re.compile(r"(?<=model=\")me/[\w-]+")  # its model, on the Hub


def tokenizer_of(kind):
    corpus = data.builtin_corpus(train=200, dev=1, test=1)["train"]
    return data.train_tokenizer([*corpus["source"], *corpus["target"]], 600, kind=kind)


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    """In the place of a Marian model of the Hub: its layers, and sizes that the README's settings fit."""
    folder = tmp_path_factory.mktemp("translator")
    tokenizer = tokenizer_of("bpe")
    config = MarianConfig(
        vocab_size=len(tokenizer),
        d_model=144,
        encoder_ffn_dim=544,
        decoder_ffn_dim=544,
        encoder_layers=3,
        decoder_layers=6,
        encoder_attention_heads=8,
        decoder_attention_heads=4,
        max_position_embeddings=64,
        max_length=20,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        forced_eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )
    MarianMTModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def classifier_of(folder, layers, width):
    tokenizer = tokenizer_of("wordpiece")
    sizes = {"hidden_size": 16, "num_hidden_layers": layers, "num_attention_heads": 2, "intermediate_size": width}
    BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return classifier_of(tmp_path_factory.mktemp("classifier"), 1, 64)


@pytest.fixture(scope="module")
def deep_classifier(tmp_path_factory):
    """For a page that selects layers 0 and 2."""
    return classifier_of(tmp_path_factory.mktemp("classifier"), 3, 64)


@pytest.fixture(scope="module")
def wide_classifier(tmp_path_factory):
    """For pages that keep 1,536 neurons of each FFN."""
    return classifier_of(tmp_path_factory.mktemp("classifier"), 1, 2048)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run."""
    folder = tmp_path_factory.mktemp("grid")
    rows = {"3": {"label": "FFN random", "methods": [{"method": "freeze", "ffn": "random"}]}}
    recipe = load_recipe(write_recipe(folder / "recipe.yaml", TINY | {"rows": rows}))
    execute(expand(recipe)[0], folder / "row-3-seed-1")
    return folder / "row-3-seed-1"


@pytest.fixture
def place(request, tmp_path, monkeypatch):
    """place(text) puts into the working directory what the text names: folders of the repository, and small models."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        huggingface_hub.constants, "HF_HUB_OFFLINE", True
    )  # what is not put here must not be looked for
    for name in ("recipes", "benchmarks", "docs", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)

    def put(text):
        kind = "wide_" if "width=1536" in text else "deep_" if "[0, 2]" in text else ""
        for pattern, fixture, inside in (
            (TRANSLATOR, "translator", ""),
            (CLASSIFIER, f"{kind}classifier", ""),
            (RUN, "run", ""),
            (PUBLISHED, "run", "model"),
        ):
            for name in sorted(set(pattern.findall(text))):
                shutil.copytree(request.getfixturevalue(fixture) / inside, tmp_path / name)
        return tmp_path

    return put


def imported_by(block):
    """Top-level names of the packages that the Python of a block imports."""
    nodes = list(ast.walk(ast.parse(block.code))) if block.language == "python" else []
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("name", PAGES)
def test_the_blocks_of_a_page_work(name, place):
    blocks = [block for block in blocks_of(PAGES[name]) if not is_worked_example(block)]
    if missing := [package for package in OTHER_TOOLS if importlib.util.find_spec(package) is None]:
        blocks = [
            block for block in blocks if not set(missing) & imported_by(block)
        ]  # the extra other-tools, which is optional
    if name == "docs/reference/commands.md":  # made from --help; the guides run these commands, here they are only read
        blocks = [replace(block, code=re.sub(r"\bruns/\S+", "MODEL", block.code)) for block in blocks]
    check_page(blocks, place("".join(block.code for block in blocks)))


def tours():
    """Name of each tour -> its blocks, after those of the beginning, which all share."""
    found, shared = {}, []
    lines = TOURS.read_text(encoding="utf-8").splitlines()
    names = {number: line[3:] for number, line in enumerate(lines, start=1) if line.startswith("## ")}
    for block in blocks_of(TOURS):
        name = next((names[number] for number in sorted(names, reverse=True) if number < block.line), "")
        (found.setdefault(name, list(shared)) if name else shared).append(block)
    return found


@pytest.mark.parametrize("name", ["The researcher", "The engineer", "The maintainer"])
def test_a_tour_runs_by_itself_from_its_first_block_to_its_last(name, place):
    printed = walk(tours()[name], place(""), LESS)
    if name == "The researcher":
        assert re.search(r"ffn +│ +16 │ +0 │", "".join(printed))  # of `diff`: the merged FFNs are those of the seed
    if name == "The maintainer":  # what users of the variant and of the merged model read
        variant, merged = (text.strip().splitlines()[-1] for text in printed[-2:])
        assert merged == f"{variant} False"


@pytest.mark.parametrize("page", [TOURS, ROOT / "README.md"], ids=lambda page: page.name)
def test_blocks_can_be_pasted_into_the_prompt_of_python(page):
    """Before Python 3.13, a line that follows an indented one without an empty line between is an error there."""
    for block in blocks_of(page):
        typed = ""
        for line in [*block.code.splitlines(), ""] if block.language == "python" else []:
            typed += line + "\n"
            if codeop.compile_command(typed.removesuffix("\n") if line.strip() else typed) is not None:
                typed = ""
        assert not typed.strip(), block.place


def test_every_tour_has_four_to_six_steps_and_is_run():
    assert list(tours()) == ["The researcher", "The engineer", "The maintainer"]
    for part in re.split(r"^## ", TOURS.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        assert re.findall(r"^### (\d)\.", part, re.MULTILINE) in [list("1234"), list("12345"), list("123456")]


FAULTS = {
    "a syntax error": ("python", "make_variant(trained, ...)]"),
    "a name that nothing defines": ("python", "make_variant(trained, [])"),
    "an unknown command": ("bash", "hf-freeze freeze MODEL"),
    "an unknown option": ("bash", "hf-freeze run RECIPE --fast"),
    "a missing argument": ("bash", "hf-freeze push runs/a"),
    "a missing recipe": ("bash", "hf-freeze run recipes/none.yaml"),
    "an unknown setting": ("bash", "hf-freeze run recipes/theseus/bert.yaml --set training.bf17=auto"),
    "an unknown method": ("bash", "hf-freeze methods; hf-freeze methods low_rang"),
    "an unknown extra": ("bash", 'pip install -c constraints.txt -e ".[exports]"'),
    "a version that is not pinned": ("bash", "pip install torch==1.0.0"),
    "an unknown target": ("bash", "make demos"),
    "a missing script": ("bash", "python benchmarks/none.py"),
    "an unknown option of a script": ("bash", "python recipes/small_translator/train.py --begin FOLDER"),
    "an unknown option of lm-eval": (
        "bash",
        "lm_eval run --modell hf --model_args pretrained=tests --tasks a --include_path .",
    ),
    "a missing model of lm-eval": (
        "bash",
        "lm_eval run --model hf --model_args pretrained=none --tasks a --include_path .",
    ),
    "a missing config": ("bash", "accelerate launch --config_file recipes/accelerate/none.yaml"),
    "a program without a check": ("bash", "rm -r runs"),
    "a recipe with an unknown field": ("yaml", 'rows:\n  "0": {label: a, method: []}'),
    "a language without a check": ("toml", "a = 1"),
}


@pytest.mark.parametrize(("language", "code"), FAULTS.values(), ids=FAULTS)
def test_a_fault_in_a_block_is_found(language, code, place):
    block = Block(ROOT / "recipes" / "theseus" / "README.md", 1, language, code, "")
    with pytest.raises((AssertionError, SyntaxError, NameError)):
        check_page([block], place(code))


def test_a_printed_line_that_has_changed_is_found(place):
    with pytest.raises(AssertionError):
        check_page(blocks_of(ROOT / "README.md", "```python\nprint(1)\n```\n\nThis prints `2`."), place(""))
