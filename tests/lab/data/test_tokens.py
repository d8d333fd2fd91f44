"""Tokens on the disk: the same batches as tokens in memory, computed once, never half."""

import functools
import json
import multiprocessing
import os
import select
import time

import numpy as np
import pytest
from datasets import Dataset
from support.recipes import LM, MASKED, TINY, changed
from torch.utils.data import DataLoader
from transformers import Seq2SeqTrainingArguments

from hf_freeze import make_variant
from hf_freeze.lab.data import (
    TokenBatchSampler,
    TokenDataset,
    builtin_corpus,
    cache,
    cached_blocks,
    masked_blocks,
    read_parallel,
    read_text,
    text_blocks,
    tokenise,
    tokens,
    train_tokenizer,
)
from hf_freeze.lab.recipes.recipe import Run
from hf_freeze.lab.recipes.settings import Data
from hf_freeze.lab.runs.backbones import backbone_config
from hf_freeze.lab.runs.processes import Processes
from hf_freeze.lab.tasks.registry import task_of

SIDES = {"input_ids": "source", "labels": "target"}
FORK = multiprocessing.get_context("fork") if hasattr(os, "fork") else multiprocessing.get_context()


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache" / "hf_freeze"


@pytest.fixture(scope="module")
def corpus():
    return builtin_corpus(train=750, dev=1, test=1)["train"]


@pytest.fixture(scope="module")
def tokenizer(corpus):
    tokenizer = train_tokenizer([*corpus["source"], *corpus["target"]], 200)
    tokenizer.model_max_length = 24
    return tokenizer


@pytest.fixture
def parallel(corpus, tmp_path):
    for side in ("source", "target"):
        (tmp_path / side).write_text("\n".join(corpus[side]) + "\n", encoding="utf-8")
    return read_parallel(tmp_path / "source", tmp_path / "target")


def kinds_of_folders(folder):
    names = [path.name for path in folder.iterdir() if path.is_dir()]
    return sorted("hidden" if name.startswith(".") else name.partition("-")[0] for name in names)


def rows(data):
    return [dict(data[i]) for i in range(len(data))]


@pytest.mark.parametrize("processes", [1, 3])
def test_tokens_on_the_disk_are_those_in_memory(parallel, corpus, tokenizer, processes, monkeypatch):
    monkeypatch.setattr(tokens, "_ROWS_PER_PROCESS", 100)
    stored = tokenise(parallel, tokenizer, SIDES, processes=processes)
    assert isinstance(stored, TokenDataset)
    memory = tokenise(corpus, tokenizer, SIDES)
    assert isinstance(memory, Dataset)
    assert not memory.cache_files
    assert rows(stored) == rows(memory)
    assert stored["labels"][:] == memory["labels"][:]
    assert stored.__getitems__([3, 1]) == [memory[3], memory[1]]
    expected = {name: tokenizer(corpus[side][:], truncation=True)["input_ids"] for name, side in SIDES.items()}
    assert memory.to_dict() == expected
    for name, ids in expected.items():
        assert stored.lengths[name].dtype == np.int32
        assert stored.lengths[name].tolist() == list(map(len, ids))
    assert stored.largest == max(i for ids in expected.values() for sentence in ids for i in sentence)
    assert max(map(len, expected["labels"])) == 24, "some are truncated"


def test_large_vocabularies_and_pages_that_are_given_back(parallel, corpus, tokenizer, monkeypatch):
    small = tokenise(parallel, tokenizer, SIDES)
    monkeypatch.setattr(tokens, "_RESIDENT", 100)
    monkeypatch.setattr(type(tokenizer), "__len__", lambda self: 1 << 17)
    monkeypatch.setattr(tokens, "tokenizer_key", lambda tokenizer: "large")
    large = tokenise(parallel, tokenizer, SIDES)
    assert large._releases
    assert not small._releases
    types = [str(data.rows.features["labels"].feature.dtype) for data in (small, large)]
    assert types == ["uint16", "int32"]
    everything = list(range(len(corpus)))
    for _ in range(2):
        assert small.__getitems__(everything) == large.__getitems__(everything)


def test_the_second_start_computes_nothing(parallel, tokenizer, tmp_path, monkeypatch):
    first = tokenise(parallel, tokenizer, SIDES)
    monkeypatch.setattr(tokens, "write_ids", None)
    monkeypatch.setattr(cache, "write_tables", None)
    again = read_parallel(tmp_path / "source", tmp_path / "target")
    assert tokenise(again, tokenizer, SIDES).folder == first.folder


def test_the_cache_names_data_tokenizer_and_settings(parallel, corpus, tokenizer, tmp_path):
    first = tokenise(parallel, tokenizer, SIDES).folder
    other = train_tokenizer([*corpus["source"]], 150)
    other.model_max_length = 24
    shorter = train_tokenizer([*corpus["source"], *corpus["target"]], 200)
    shorter.model_max_length = 20
    same = train_tokenizer([*corpus["source"], *corpus["target"]], 200)
    same.model_max_length = 24
    same(["a"], padding=True, truncation=True, max_length=3)  # how it was called last is no part of it
    assert tokenise(parallel, same, SIDES).folder == first
    folders = [
        tokenise(parallel, other, SIDES).folder,
        tokenise(parallel, shorter, SIDES).folder,
        tokenise(parallel, tokenizer, dict(zip(SIDES, reversed(SIDES.values()), strict=True))).folder,
        tokenise(parallel.select(range(100)), tokenizer, SIDES).folder,
        first,
    ]
    assert len(set(folders)) == len(folders)


def test_files_that_change_are_read_anew(parallel, corpus, tokenizer, tmp_path):
    first = tokenise(parallel, tokenizer, SIDES)
    status = (tmp_path / "source").stat()
    text = (tmp_path / "source").read_text()
    (tmp_path / "source").write_text(text[::-1].replace("\n", "", 1) + "\n")  # as long as before
    os.utime(tmp_path / "source", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    changed_text = read_parallel(tmp_path / "source", tmp_path / "target")
    assert changed_text[0]["source"] == corpus[-1]["source"][::-1]
    second = tokenise(changed_text, tokenizer, SIDES)
    assert second.folder != first.folder
    assert second[0]["input_ids"] == tokenizer(corpus[-1]["source"][::-1], truncation=True)["input_ids"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_what_is_killed_is_not_taken_for_whole(corpus, tmp_path, own_cache):
    for side in ("source", "target"):
        (tmp_path / side).write_text("\n".join(corpus[side]) + "\n", encoding="utf-8")
    writing = FORK.Event()

    def write_slowly():
        cache.sync = lambda path: (writing.set(), time.sleep(100))
        read_parallel(tmp_path / "source", tmp_path / "target")

    process = FORK.Process(target=write_slowly)
    process.start()
    assert writing.wait(60)
    process.kill()
    process.join()
    assert kinds_of_folders(own_cache) == ["hidden"]
    data = read_parallel(tmp_path / "source", tmp_path / "target")
    assert data.to_dict() == corpus.to_dict()
    assert kinds_of_folders(own_cache) == ["text"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_processes_end_with_who_asked_for_them(parallel, tokenizer, own_cache, monkeypatch):
    reading, writing = os.pipe()

    class Slow:
        def __init__(self, *args, **options):
            pass

        def __call__(self, texts):
            os.write(writing, b"w")
            time.sleep(100)

    monkeypatch.setattr(tokens, "_ROWS_PER_PROCESS", 300)
    monkeypatch.setattr(tokens, "_ROWS", 300)
    monkeypatch.setattr(tokens, "Encoder", Slow)
    process = FORK.Process(target=tokenise, args=(parallel, tokenizer, SIDES), kwargs={"processes": 2})
    process.start()
    os.close(writing)
    assert os.read(reading, 1) == b"w"
    process.kill()
    process.join()
    while (ready := select.select([reading], [], [], 30)[0]) and os.read(reading, 1):
        pass
    os.close(reading)
    assert ready, "the pipe closes when the last process ends"
    assert kinds_of_folders(own_cache) == ["hidden", "text"]


def test_an_error_in_a_process_is_raised(parallel, tokenizer, monkeypatch):
    monkeypatch.setattr(tokens, "_ROWS_PER_PROCESS", 300)
    with pytest.raises(TypeError):
        list(tokens.id_tables(tokens.Rows(parallel, {"a": "source"}, len, 100), 2))


def test_an_error_leaves_nothing(parallel, tokenizer, own_cache, monkeypatch):
    monkeypatch.setattr(tokens, "write_ids", lambda *_: 1 / 0)
    before = {path for path in own_cache.iterdir() if path.is_dir()}
    with pytest.raises(ZeroDivisionError):
        tokenise(parallel, tokenizer, SIDES)
    assert {path for path in own_cache.iterdir() if path.is_dir()} == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_one_process_computes_and_the_others_wait(tmp_path):
    def write(part):
        with (tmp_path / "calls").open("a") as calls:
            calls.write("x")
        time.sleep(0.5)
        (part / "a").write_text("b")

    def read(number):
        (tmp_path / f"read-{number}").write_text((cache.cached_folder("test", 1, write) / "a").read_text())

    processes = [FORK.Process(target=read, args=(number,)) for number in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [(tmp_path / f"read-{number}").read_text() for number in range(3)] == ["b"] * 3
    assert (tmp_path / "calls").read_text() == "x"


def test_progress(parallel, tokenizer, monkeypatch):
    monkeypatch.setattr(tokens, "_ROWS", 300)
    monkeypatch.setattr(tokens, "tqdm", functools.partial(tokens.tqdm, disable=True))  # as in a grid
    said = []

    class Slow:
        def __init__(self, inner):
            self.inner = inner

        def __call__(self, texts):
            time.sleep(0.4)
            return self.inner(texts)

    real = tokens.Encoder
    monkeypatch.setattr(tokens, "Encoder", lambda *args, **kwargs: Slow(real(*args, **kwargs)))
    tokenise(parallel, tokenizer, SIDES, processes=1, progress=lambda done, rows: said.append((done, rows)))
    assert said[0] == (0, 750)
    assert said[-1] == (750, 750)
    assert [done for done, _ in said] == sorted(done for done, _ in said)
    assert any(0 < done < 750 for done, _ in said)


def test_ids_outside_the_vocabulary(parallel, tokenizer, monkeypatch):
    monkeypatch.setattr(tokens, "_ROWS", 300)
    stored = tokenise(parallel, tokenizer, SIDES)
    stored.check_ids(stored.largest + 1)
    for vocab_size in (stored.largest, 100):
        number, i = next(
            (number, i) for column in SIDES for number, ids in enumerate(stored[column]) for i in ids if i >= vocab_size
        )
        message = rf"^sentence {number} holds token id {i}, outside the model's vocabulary 0\.\.{vocab_size - 1}$"
        with pytest.raises(ValueError, match=message):
            stored.check_ids(vocab_size)


def test_a_tokenizer_whose_fast_path_differs_goes_the_slow_one(corpus, tokenizer):
    class Odd:
        backend_tokenizer = tokenizer.backend_tokenizer

        def __call__(self, texts, **options):
            return {"input_ids": [[7, *ids] for ids in tokenizer(texts, **options)["input_ids"]]}

    assert all(ids[0] == 7 for ids in tokens.Encoder(Odd(), corpus, "source", truncation=True)(["a", "b"]))


# -- blocks ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 16, 1001])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rows_at_a_time", [3, 1000])
def test_blocks_on_the_disk_are_those_in_memory(corpus, tmp_path, monkeypatch, size, masked, rows_at_a_time):
    monkeypatch.setattr(tokens, "_ROWS", rows_at_a_time)
    texts = corpus["target"][:100]
    (tmp_path / "text").write_text("\n".join(texts))
    kind = ("wordpiece", "after") if masked else ("bpe", "before")
    tokenizer = train_tokenizer(texts, 120, kind[0], eos=kind[1])
    stored = cached_blocks(read_text([tmp_path / "text"]), tokenizer, size, masked=masked)
    expected = (masked_blocks if masked else text_blocks)(texts, tokenizer, size)
    assert rows(stored) == rows(expected)
    assert stored.lengths["labels"].tolist() == [len(row["labels"]) for row in expected]
    assert sorted(path.name for path in stored.folder.iterdir()) == [
        "facts.json", "input_ids.npy", "labels.npy", "rows.arrow",
    ]  # fmt: skip


def test_a_text_shorter_than_a_block(tmp_path):
    (tmp_path / "text").write_text("one\ntwo")
    tokenizer = train_tokenizer(["one two"] * 9, 20, eos="before")
    with pytest.raises(ValueError, match=r"the text has \d+ tokens, fewer than one block of 512"):
        cached_blocks(read_text([tmp_path / "text"]), tokenizer, 512)


# -- training --------------------------------------------------------------------------------------------------------------------


def trainer_of(folder, data, task_name="translation", **arguments):
    recipe = changed(TINY, {"translation": {}, "language-modelling": LM, "masked-lm": MASKED}[task_name])
    run = Run(row="0", seed=1, label="", name="tiny", task=task_name, data=recipe["data"], **recipe["presets"]["small"])
    task = task_of(task_name)
    splits = task.load(Data(**data))
    tokenizer = tokens.tokenizer_for(
        task.texts(splits["train"]), 100, run.tokenizer.kind or task.tokenizer, eos=task.eos
    )
    config = backbone_config(run.backbone, tokenizer)
    tokenizer.model_max_length = config.max_position_embeddings
    model = make_variant(config, [], task=task.head, seed=1)
    settings = {"use_cpu": True, "report_to": "none", "seed": 3, "disable_tqdm": True} | arguments
    return task.trainer(
        model=model,
        args=Seq2SeqTrainingArguments(str(folder), accelerator_config={"even_batches": False}, **settings),
        train_dataset=task.encode(splits["train"], tokenizer, run),
        data_collator=task.collator(tokenizer, model),
        processing_class=tokenizer,
        max_tokens=200,
    )


@pytest.mark.parametrize("task_name", ["translation", "language-modelling", "masked-lm"])
def test_files_give_the_batches_of_the_builtin_corpus(task_name, tmp_path):
    builtin = {"builtin": {"seed": 0, "train": 250, "dev": 5, "test": 5}}
    files: dict = {"root": str(tmp_path)}
    for name, split in builtin_corpus(**builtin["builtin"]).items():
        for side in ("source", "target"):
            (tmp_path / f"{name}.{side}").write_text("\n".join(split[side]))
        files[str(name)] = [f"{name}.source", f"{name}.target"] if task_name == "translation" else [f"{name}.target"]
    found = []
    for data in (builtin, files):
        loader = trainer_of(tmp_path / "out", data, task_name).get_train_dataloader()
        found.append([])
        for epoch in range(2):
            loader.set_epoch(epoch)
            found[-1] += [{name: value.tolist() for name, value in batch.items()} for batch in loader]
    assert len(found[0]) > 20
    assert found[0] == found[1]


def test_training_resumes_at_the_exact_batch(tmp_path):
    """Killed within the second epoch: what follows is what would have followed, bit by bit."""
    for name, split in builtin_corpus(train=150, dev=5, test=5).items():
        for side in ("source", "target"):
            (tmp_path / f"{name}.{side}").write_text("\n".join(split[side]))
    data = {"root": str(tmp_path)} | {name: [f"{name}.source", f"{name}.target"] for name in ("train", "dev", "test")}

    def run(folder, steps, checkpoint=None):
        saving = {"save_steps": steps, "save_strategy": "steps"} if steps else {"save_strategy": "no"}
        trainer = trainer_of(folder, data, num_train_epochs=3, max_steps=-1, **saving)
        batches = []
        real = trainer.training_step

        def step(model, inputs, *args, **kwargs):
            batches.append(json.dumps({name: value.tolist() for name, value in inputs.items()}))
            trainer.control.should_training_stop = len(batches) == steps
            return real(model, inputs, *args, **kwargs)

        trainer.training_step = step
        trainer.train(resume_from_checkpoint=checkpoint)
        return batches, trainer

    whole, trained = run(tmp_path / "whole", None)
    an_epoch = len(whole) // 3
    stop = an_epoch + an_epoch // 2
    begun, _ = run(tmp_path / "killed", stop)
    assert begun == whole[:stop]
    rest, resumed = run(tmp_path / "killed", None, str(tmp_path / "killed" / f"checkpoint-{stop}"))
    assert rest == whole[stop:]
    ends = [trainer.model.state_dict() for trainer in (trained, resumed)]
    assert all((value == ends[1][name]).all() for name, value in ends[0].items())


def test_the_sampler_takes_lengths_on_the_disk(tmp_path):
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 40, (2, 1000), dtype=np.int32)
    for name, values in zip("ab", lengths, strict=True):
        np.save(tmp_path / name, values)
    mapped = [np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "ab"]
    plain = TokenBatchSampler(lengths[0].tolist(), lengths[1].tolist(), 100, seed=2)
    assert list(TokenBatchSampler(*mapped, 100, seed=2)) == list(plain)


def test_other_loaders_take_tokens_on_the_disk(tmp_path):
    """The Trainer's own for evaluation, which measures attention heads, and one with workers."""
    for name, split in builtin_corpus(train=40, dev=5, test=5).items():
        for side in ("source", "target"):
            (tmp_path / f"{name}.{side}").write_text("\n".join(split[side]))
    data = {"root": str(tmp_path)} | {name: [f"{name}.source", f"{name}.target"] for name in ("train", "dev", "test")}
    trainer = trainer_of(tmp_path / "out", data)
    stored = trainer.train_dataset
    assert isinstance(stored, TokenDataset)
    assert sum(len(batch["labels"]) for batch in trainer.get_eval_dataloader(stored)) == 40
    context = Processes(jobs=2, resume_anyway=False).context  # pickles as spawn does, and has imported already
    workers = DataLoader(stored, batch_size=7, collate_fn=list, num_workers=1, multiprocessing_context=context)
    assert [row for batch in workers for row in batch] == rows(stored)
