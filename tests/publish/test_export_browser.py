"""Exports for web browsers: transformers.js in headless Chromium computes what Python does, and the page says what is wrong."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from support.browser import dump_page, needs_browser, posted_by, served
from support.small import small_config
from support.text import SOURCE, fast_tokenizer, marian_tokenizer
from support.tokenizers_of_each_kind import byte_level, character_bpe, wordpiece
from test_export import marian, save
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    XLNetForSequenceClassification,
)

from hf_freeze import make_variant, methods
from hf_freeze.model.loading import load_model
from hf_freeze.publish.export import export_model, page, transformers_js
from hf_freeze.publish.export.page import PACKAGES, VERSIONS
from hf_freeze.publish.export.served import opened

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
TEXTS = ["der hund schläft im garten", "the cat drinks cold milk", "guten morgen"]
NEW = 8  # tokens
# `load`: the part of each page that opens transformers.js. A page that fails posts its error.
LOAD = """<!doctype html><meta charset="utf-8">
<script type="importmap">{"imports":
  {"onnxruntime-web/webgpu": "./runtime/ort.wasm.min.mjs", "onnxruntime-common": "./runtime/ort.wasm.min.mjs"}}</script>
<script type="module">
const post = value => fetch("/", { method: "POST", body: JSON.stringify(value) });
window.onunhandledrejection = event => post({ error: String(event.reason?.stack ?? event.reason) });
const { pipeline, env } = await import("./runtime/transformers.web.min.js");
Object.assign(env, { allowRemoteModels: false, allowLocalModels: true, localModelPath: "./", useBrowserCache: false });
env.useWasmCache = false;
env.backends.onnx.wasm.wasmPaths = new URL("runtime/", location.href).href;
"""
RUN = """
const found = {};
for (const dtype of ["fp32", "fp16", "q8"]) {
  const open = (task, name) => pipeline(task, name, { dtype });
  const label = await open("text-classification", "classifier"), vector = await open("feature-extraction", "encoder");
  const translate = await open("translation", "translator");
  const rows = found[dtype] = { labels: [], vectors: [], translations: [], llama: [], gpt2: [] };
  for (const text of TEXTS) {
    rows.labels.push((await label(text))[0]);
    rows.vectors.push((await vector(text, { pooling: "mean", normalize: true })).tolist()[0]);
    rows.translations.push((await translate(text, { max_new_tokens: NEW }))[0].translation_text);
  }
  for (const name of dtype === "fp32" ? ["llama", "gpt2"] : []) {
    const go_on = await open("text-generation", name);
    for (const text of TEXTS) rows[name].push((await go_on(text, { max_new_tokens: NEW, do_sample: false }))[0].generated_text);
  }
}
post(found);
</script>"""


@pytest.fixture(scope="session")
def packages(tmp_path_factory):
    """A folder node_modules with the packages of the page, from npm."""
    folder = tmp_path_factory.mktemp("npm")
    for package, version in VERSIONS.items():
        try:
            (folder / "packed" / package).mkdir(parents=True)
            packed = page._packed(package, version, folder / "packed" / package)
        except (ValueError, OSError) as error:
            pytest.skip(f"no packages of npm: {error}")
        shutil.copytree(packed, folder / "node_modules" / package)
    return folder / "node_modules"


@pytest.fixture
def with_packages(packages, monkeypatch):
    monkeypatch.setenv(PACKAGES, str(packages))


def moved(model):
    """As if trained: every value is moved."""
    torch.manual_seed(3)
    for parameter in model.parameters():
        parameter.data += 0.5 * torch.randn_like(parameter)
    return model.eval()


def pruned_translator(folder: Path) -> Path:
    """With other numbers of heads in each layer, and factors."""
    tokenizer = fast_tokenizer(folder)
    native = marian(tokenizer)
    heads = {"encoder.0.self": [1], "decoder.0.self": [0], "decoder.0.cross": [1]}
    variant = make_variant(native, [methods.HeadPruning(heads=heads), methods.LowRank(rank=3, components=["ffn"])])
    return save(folder, variant.eval(), tokenizer)


def sources(folder: Path) -> dict[str, Path]:
    """Small models of each kind that the page of the test runs."""
    pieces, bytewise, characters = wordpiece(folder), byte_level(folder), character_bpe(folder)
    labels = {"id2label": {0: "bad", 1: "good", 2: "neither"}, "label2id": {"bad": 0, "good": 1, "neither": 2}}
    bert = SMALL | {"vocab_size": len(pieces), "max_position_embeddings": 40}
    classifier = moved(BertForSequenceClassification(BertConfig(**bert, **labels)))
    encoder = moved(BertModel(BertConfig(**bert)))
    sparse = methods.MagnitudePruning(sparsity=0.5)
    ends = {"bos_token_id": characters.eos_token_id, "eos_token_id": characters.eos_token_id}
    llama = moved(LlamaForCausalLM(LlamaConfig(**SMALL, vocab_size=len(characters), num_key_value_heads=4, **ends)))
    gpt2 = GPT2Config(
        n_embd=16, n_layer=2, n_head=2, n_positions=64, vocab_size=len(bytewise), eos_token_id=bytewise.eos_token_id
    )
    uneven = methods.HeadPruning(heads={"decoder.0.self": [0, 2]})
    return {
        "classifier": save(folder / "classifier", make_variant(classifier, [sparse]), pieces),
        "encoder": save(folder / "encoder", encoder, pieces),
        "llama": save(folder / "llama", make_variant(llama, [uneven]), characters),
        "gpt2": save(folder / "gpt2", moved(GPT2LMHeadModel(gpt2)), bytewise),
    }


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    return pruned_translator(tmp_path_factory.mktemp("translator"))


@pytest.fixture(scope="module")
def exported(translator, tmp_path_factory):
    return export_model(translator, "transformers-js", out=tmp_path_factory.mktemp("exported") / "out")


@torch.no_grad()
def expected_of(folder: Path) -> list:
    """What the model in Python answers: vectors, (label, score), or texts, by greedy search."""
    model, tokenizer = load_model(folder).eval(), AutoTokenizer.from_pretrained(folder)
    answers = []
    for text in TEXTS:
        inputs = tokenizer(text, return_tensors="pt")
        if model.can_generate():
            ids = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, num_beams=1)[0]
            answers.append(tokenizer.decode(ids, skip_special_tokens=True))
        elif hasattr(found := model(**inputs), "logits"):
            score, number = found.logits.softmax(-1)[0].max(-1)
            answers.append((model.config.id2label[int(number)], float(score)))
        else:
            answers.append(torch.nn.functional.normalize(found.last_hidden_state.mean(1))[0].tolist())
    return answers


@needs_browser
def test_a_browser_answers_as_python_does(translator, exported, with_packages, tmp_path):
    models = sources(tmp_path / "sources")
    site = tmp_path / "site"
    site.mkdir()
    page.copy_runtime(site / "runtime")
    for name, folder in models.items():
        one = "fp32" if name in ("llama", "gpt2") else None
        export_model(folder, "transformers-js", out=site / name, quantization=one)
    shutil.copytree(exported, site / "translator")
    (site / "index.html").write_text(
        LOAD + RUN.replace("TEXTS", json.dumps(TEXTS)).replace("NEW", str(NEW)), encoding="utf-8"
    )
    with served(site) as server:
        found = posted_by(server, "index.html", tmp_path / "profile")
    assert "error" not in found, found
    expected = {name: expected_of(folder) for name, folder in (models | {"translator": translator}).items()}
    for dtype, tolerance in {"fp32": 1e-4, "fp16": 0.02}.items():
        assert [one["label"] for one in found[dtype]["labels"]] == [label for label, _ in expected["classifier"]]
        scores = [one["score"] for one in found[dtype]["labels"]]
        np.testing.assert_allclose(scores, [score for _, score in expected["classifier"]], atol=tolerance)
        np.testing.assert_allclose(found[dtype]["vectors"], expected["encoder"], atol=tolerance)
    for name, key in (("translator", "translations"), ("llama", "llama"), ("gpt2", "gpt2")):
        assert found["fp32"][key] == expected[name]
    # In int8, the kernels of WebAssembly compute what those of this machine do.
    session = onnxruntime.InferenceSession(site / "encoder" / "onnx" / "model_quantized.onnx")
    for text, vector in zip(TEXTS, found["q8"]["vectors"], strict=True):
        inputs = AutoTokenizer.from_pretrained(models["encoder"])(text, return_tensors="np")
        states = session.run(["last_hidden_state"], {one.name: inputs[one.name] for one in session.get_inputs()})[0]
        mean = states.mean(1)[0]
        assert np.dot(mean / np.linalg.norm(mean), vector) > 0.9999
    assert all(found["q8"]["translations"])


# -- files -------------------------------------------------------------------------------------------------------------------


def test_a_folder_has_the_files_that_transformers_js_asks_for(exported):
    folder = exported
    parts = {"encoder_model", "decoder_model_merged"}
    assert {path.name for path in (folder / "onnx").iterdir()} == {
        f"{part}{suffix}.onnx" for part in parts for suffix in ("", "_fp16", "_quantized")
    }
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("marian", ["MarianMTModel"])
    assert "methods" not in config
    assert "transformers.js_config" not in config
    session = onnxruntime.InferenceSession(folder / "onnx" / "decoder_model_merged.onnx")
    shapes = {one.name: one.shape for one in session.get_inputs()}
    assert shapes["past_key_values.0.decoder.key"][:2] == ["batch_size", 1]  # one of the two heads is gone
    assert shapes["use_cache_branch"] == [1]


def small_encoder(folder: Path) -> Path:
    tokenizer = wordpiece(folder)
    sizes = SMALL | {"num_hidden_layers": 1, "vocab_size": len(tokenizer), "max_position_embeddings": 40}
    return save(folder, moved(BertModel(BertConfig(**sizes))), tokenizer)


def test_a_folder_in_one_format_says_which(tmp_path):
    folder = export_model(small_encoder(tmp_path / "encoder"), "transformers-js", quantization="fp16")
    assert [path.stem for path in (folder / "onnx").iterdir()] == ["model_fp16"]
    assert json.loads((folder / "config.json").read_text())["transformers.js_config"] == {"dtype": "fp16"}


def test_what_is_smaller_stays_smaller(tmp_path):
    tokenizer = wordpiece(tmp_path)
    sizes = SMALL | {"hidden_size": 64, "intermediate_size": 512, "vocab_size": len(tokenizer)}
    native = moved(BertForSequenceClassification(BertConfig(**sizes)))
    factors = make_variant(native, [methods.LowRank(rank=4, components=["ffn"])])
    bytes_of = {}
    for name, model in {"native": native, "factors": factors}.items():
        folder = export_model(
            save(tmp_path / name, model, tokenizer), "transformers-js", out=tmp_path / f"{name}-js", quantization="fp32"
        )
        bytes_of[name] = (folder / "onnx" / "model.onnx").stat().st_size
    saved = 4 * sum(p.numel() for p in native.parameters()) - 4 * sum(p.numel() for p in factors.parameters())
    assert bytes_of["native"] - bytes_of["factors"] == pytest.approx(saved, rel=0.02)


def test_a_graph_that_computes_something_else_is_refused(translator, tmp_path, monkeypatch):
    whole = transformers_js._browser_graphs

    def wrong(*args):
        graphs = whole(*args)
        first, second = graphs["decoder_model_merged"].graph.outputs[-2:]  # keys and values of cross-attention
        first.name, second.name = second.name, first.name
        return graphs

    monkeypatch.setattr(transformers_js, "_browser_graphs", wrong)
    with pytest.raises(ValueError, match="the files in fp32 do not compute the same as"):
        export_model(translator, "transformers-js", out=tmp_path / "out", quantization="fp32")


def test_texts_are_cut_where_positions_end_or_the_sentence_files_say(tmp_path):
    source = small_encoder(tmp_path / "encoder")
    limit = lambda folder: json.loads((folder / "tokenizer_config.json").read_text())["model_max_length"]  # noqa: E731
    assert limit(export_model(source, "transformers-js", quantization="fp32")) == 40
    (source / "modules.json").write_text(json.dumps([{"path": "", "type": "sentence_transformers.models.Transformer"}]))
    (source / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 12}))
    assert limit(export_model(source, "transformers-js", quantization="fp32")) == 12


@needs_browser
def test_the_table_of_types_is_of_classes_that_transformers_js_has(packages):
    registry = (packages / "@huggingface/transformers/src/models/registry.js").read_text(encoding="utf-8")
    names = {
        "feature-extraction": "MODEL_MAPPING_NAMES_ENCODER_ONLY",
        "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
        "sequence-classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
        "token-classification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
        "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        "seq2seq-lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    }
    for task, types in transformers_js.TYPES.items():
        table = re.search(rf"const {names[task]} = new Map\(\[(.*?)\]\);", registry, re.DOTALL)
        known = set(re.findall(r"\['([^']+)',", table[1]))
        assert set(types.split()) <= known, task


# -- the page ----------------------------------------------------------------------------------------------------------------

# Opens the page in a frame of the same origin, types a sentence, and posts what the page says.
TYPE = """<!doctype html><meta charset="utf-8"><iframe src="page/index.html"></iframe><script>
const frame = document.querySelector("iframe");
frame.onload = async () => {
  const page = frame.contentDocument, said = id => page.getElementById(id).textContent, button = page.querySelector("button");
  const until = async test => { while (!test()) await new Promise(done => setTimeout(done, 50)); };
  await until(() => said("fault") || !button.disabled);
  if (!said("fault")) {
    page.getElementById("text").value = TEXT;
    button.click();
    await until(() => said("fault") || said("cost"));
  }
  const asked = frame.contentWindow.performance.getEntriesByType("resource").map(one => one.name);
  const words = Object.fromEntries(["state", "fault", "answer", "cost", "about"].map(id => [id, said(id)]));
  fetch("/", { method: "POST", body: JSON.stringify({ ...words, asked }) });
};
</script>"""


@pytest.fixture(scope="module")
def site(translator, packages, tmp_path_factory):
    """A web site with the page of a translator in page/."""
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PACKAGES, str(packages))
        export_model(translator, "transformers-js", out=folder / "page", quantization="fp32", page=True)
    (folder / "index.html").write_text(TYPE.replace("TEXT", json.dumps(SOURCE[0])), encoding="utf-8")
    return folder


def another(site: Path, folder: Path) -> Path:
    """A copy of a site, with links to the runtime."""
    return Path(
        shutil.copytree(
            site, folder, copy_function=lambda a, b: os.link(a, b) if "runtime" in str(a) else shutil.copy(a, b)
        )
    )


@needs_browser
def test_a_sentence_typed_in_the_page_is_translated_as_by_python(site, translator, tmp_path):
    model, tokenizer = load_model(translator).eval(), AutoTokenizer.from_pretrained(translator)
    ids = model.generate(**tokenizer(SOURCE[0], return_tensors="pt"), num_beams=1, do_sample=False)[0]
    with served(site) as server:
        said = posted_by(server, "index.html", tmp_path / "profile")
        assert {address.rpartition("/page/")[0] for address in said["asked"]} == {server.address}  # no other server
    assert said["answer"] == tokenizer.decode(ids, skip_special_tokens=True)
    assert (said["fault"], said["state"]) == ("", "Ready.")
    assert re.fullmatch(r"\d+ ms", said["cost"])
    size = sum(path.stat().st_size for path in (site / "page" / "onnx").iterdir())
    assert f"{size / 1e6:.2f} MB (fp32)" in said["about"]
    assert "on 1 thread, since this web server does not send the headers that threads need" in said["about"]


@needs_browser
def test_a_page_with_the_headers_of_threads_says_nothing_of_them(site, tmp_path):
    headers = {"Cross_Origin_Opener_Policy": "same-origin", "Cross_Origin_Embedder_Policy": "require-corp"}
    with served(site, **headers) as server:
        said = posted_by(server, "index.html", tmp_path / "profile")
    assert re.search(r"on \d+ threads?\. No text leaves", said["about"])


@needs_browser
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda path: path.write_bytes(path.read_bytes()[:5000]),
            r"decoder_model_merged.onnx has 5000 bytes instead of \d+",
        ),
        (Path.unlink, "The web server has no onnx/decoder_model_merged.onnx .status 404."),
    ],
    ids=["truncated", "missing"],
)
def test_the_page_says_which_file_is_damaged(site, tmp_path, change, words):
    copy = another(site, tmp_path / "site")
    change(copy / "page" / "onnx" / "decoder_model_merged.onnx")
    with served(copy) as server:
        said = posted_by(server, "index.html", tmp_path / "profile")
    assert re.search(words, said["fault"]), said
    assert said["state"] == ""


@needs_browser
def test_the_page_says_when_another_server_does_not_let_it_read_the_model(site, tmp_path):
    copy = another(site, tmp_path / "site")
    with served(site / "page") as other, served(copy) as server:
        index = copy / "page" / "index.html"
        index.write_text(index.read_text().replace("<head>", f'<head><base href="{other.address}/">'))
        said = posted_by(server, "index.html", tmp_path / "profile")
    assert f"{other.address}/" in said["fault"]
    assert "Its server must allow this page's origin" in said["fault"]


@needs_browser
def test_the_page_speaks_where_nothing_can_run(site, tmp_path):
    index = site / "page" / "index.html"
    assert "This page was opened from a file" in _fault(dump_page(index.as_uri(), tmp_path / "file")[0])
    copy = another(site, tmp_path / "site")
    without = index.read_text().replace("<head>", "<head><script>delete window.WebAssembly;</script>")
    (copy / "page" / "index.html").write_text(without)
    with served(copy) as server:
        shown = dump_page(f"{server.address}/page/", tmp_path / "wasm")[0]
    assert "This browser has no WebAssembly" in _fault(shown)


def _fault(shown: str) -> str:
    return re.search(r'<p id="fault"[^>]*>(.*?)</p>', shown)[1]


@needs_browser
@pytest.mark.parametrize(
    ("name", "answer"), [("classifier", r"(bad|good|neither) \(\d+\.\d %\)"), ("encoder", r"\(cosine -?\d\.\d{3}\)")]
)
def test_the_page_shows_labels_and_nearest_sentences(name, answer, with_packages, tmp_path):
    models = sources(tmp_path / "sources")
    site = tmp_path / "site"
    site.mkdir()
    export_model(models[name], "transformers-js", out=site / "page", page=True)
    (site / "index.html").write_text(TYPE.replace("TEXT", json.dumps(TEXTS[0])), encoding="utf-8")
    with served(site) as server:
        said = posted_by(server, "index.html", tmp_path / "profile")
    assert said["fault"] == ""
    assert len(re.findall(answer, said["answer"])) == {"classifier": 3, "encoder": 6}[name]
    assert "(int8)" in said["about"]


# -- refused -----------------------------------------------------------------------------------------------------------------


def refused(source, match, **options):
    with pytest.raises(ValueError, match=match) as error:
        export_model(source, "transformers-js", **options)
    assert "\n" not in str(error.value)


def test_models_that_transformers_js_has_no_class_for_are_refused(tmp_path):
    tokenizer = wordpiece(tmp_path)
    xlnet = XLNetForSequenceClassification(small_config("xlnet", vocab_size=len(tokenizer)))
    refused(
        save(tmp_path / "xlnet", xlnet, tokenizer),
        "takes no xlnet for sequence-classification; choose from albert, bert",
    )
    questions = BertForQuestionAnswering(BertConfig(**SMALL, vocab_size=len(tokenizer)))
    refused(
        save(tmp_path / "questions", questions, tokenizer),
        "takes no models for question-answering; choose from feature-ex",
    )


def test_a_tokenizer_without_tokenizer_json_is_refused(tmp_path):
    tokenizer = marian_tokenizer(tmp_path / "tokenizer")
    refused(
        save(tmp_path / "model", marian(tokenizer), tokenizer),
        "tokenizer.json alone, which MarianTokenizer does not write",
    )


def test_the_page_is_refused_where_it_cannot_be(translator, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="onnx has no page; choose transformers-js"):
        export_model(translator, "onnx", page=True)
    monkeypatch.delenv(PACKAGES, raising=False)
    monkeypatch.setenv("PATH", "")
    refused(translator, f"--page needs npm, which is missing: install Node.js, or set {PACKAGES}", page=True)
    monkeypatch.setenv(PACKAGES, str(tmp_path))
    refused(
        translator,
        "has no transformers.web.min.js; it should hold @huggingface/transformers@",
        page=True,
        quantization="fp32",
    )
    monkeypatch.setattr(page, "PAGES", {})
    refused(translator, "the page has no place for seq2seq-lm", page=True)


@pytest.mark.skipif(shutil.which("npm") is None, reason="no npm is installed here")
def test_what_npm_says_is_one_line(tmp_path, monkeypatch):
    monkeypatch.delenv(PACKAGES, raising=False)
    monkeypatch.setenv("npm_config_registry", "http://127.0.0.1:9/")
    monkeypatch.setenv("npm_config_fetch_retries", "0")
    monkeypatch.setenv("npm_config_cache", str(tmp_path / "cache"))
    with pytest.raises(
        ValueError, match=r"npm cannot get @huggingface/transformers@.*set HF_FREEZE_NODE_MODULES"
    ) as error:
        page.copy_runtime(tmp_path / "runtime")
    assert "\n" not in str(error.value)


def test_a_sentence_encoder_with_another_pooling_has_no_page(with_packages, tmp_path):
    source = small_encoder(tmp_path / "encoder")
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_max_tokens": True}))
    modules = [{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    (source / "modules.json").write_text(json.dumps(modules))
    refused(
        source,
        "has the pooling max, and transformers.js has mean, cls, lasttoken alone",
        page=True,
        quantization="fp32",
    )


def test_fidelity_is_measured_in_another_format(translator):
    refused(translator, "opens in browsers alone; measure onnx", min_fidelity=0.9, texts=SOURCE)


def test_a_folder_for_browsers_is_not_opened_in_python(exported):
    with pytest.raises(ValueError, match="opens in browsers alone"):
        opened(exported)
