"""A compression that is killed (SIGKILL) at the start of each step, and before each file or folder is in its place, one after
another, ends as one that nothing disturbs."""

import json
import os
import re
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import ALL
from support.tokenizers_of_each_kind import wordpiece
from transformers import BertConfig, BertModel

import hf_freeze
from hf_freeze.compression.budget import Budget
from hf_freeze.compression.report import COMPRESSION

TEXTS = [" ".join("abcdefghijklmnop"[(i * j + j) % 16] for j in range(3, 11)) for i in range(60)]
MOST = 400  # kills


def compressed(source: Path, out: Path, engine: str, callback=None) -> None:
    budget = Budget(max_bytes="45%" if engine == "torch" else "20%")
    hf_freeze.compress(
        source, texts=TEXTS, budget=budget, out=out, engine=engine, heal="2epochs", seed=1, callback=callback
    )


def run_to_the_next_event(source: Path, out: Path, engine: str, log: Path) -> int:
    """In a process of its own, which kills itself at the first event that `log` has not; its exit status."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    try:
        known, replace = set(log.read_text().splitlines()), os.replace

        def event(name: str) -> None:
            if name not in known:
                with log.open("a") as file:
                    file.write(name + "\n")
                os.kill(os.getpid(), signal.SIGKILL)

        def replaced(source: Path, target: Path, **options) -> None:
            if Path(target).name == "phases.json":
                event(f"phases {len(json.loads(Path(source).read_text())['results'])}")
            elif str(out) in str(target):
                event(f"file {re.sub(r'part_[^/]+', 'part', str(target))}")
            replace(source, target, **options)

        os.replace = replaced
        compressed(source, out, engine, lambda step: event(f"step {step.phase} {step.text}"))
        os._exit(0)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
        os._exit(1)


def contents(out: Path) -> dict[str, Any]:
    """What is served and what is trained on, the bytes of each file but that with the time; and the choice."""
    record = json.loads((out / "compressed.json").read_text())
    files = [*Path(record["after"]["folder"]).rglob("*"), *Path(record["model"]).rglob("*")]
    found = {}
    for path in files:
        if path.is_file() and path.name != COMPRESSION:
            content = path.read_bytes().replace(str(out).encode(), b"")  # it may name its folder
            found[str(path.relative_to(out))] = content
    return found | {"kept": record["kept"], "fidelity": json.dumps(record["after"]["fidelity"])}


@pytest.mark.skipif(not ALL, reason="as many processes as there are steps, some minutes: HF_FREEZE_TESTS=all")
@pytest.mark.parametrize("engine", ["torch", "onnx"])
def test_a_killed_compression_ends_as_an_undisturbed_one(engine, tmp_path):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer, source = wordpiece(TEXTS), tmp_path / "model"
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 256,
    }
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=40, initializer_range=0.2, **sizes)
    BertModel(config).save_pretrained(source)
    tokenizer.save_pretrained(source)
    compressed(source, tmp_path / "undisturbed", engine)
    (log := tmp_path / "events").touch()
    for _kills in range(MOST):
        if (status := run_to_the_next_event(source, tmp_path / "killed", engine, log)) == 0:
            break
        assert os.WIFSIGNALED(status), "a process that was not killed failed"
    assert status == 0
    phases = {line.split()[1] for line in log.read_text().splitlines() if line.startswith("step ")}
    assert phases == {"measuring", "cut", "heal", "engine"}
    assert not list((tmp_path / "killed").rglob("*.part"))
    assert contents(tmp_path / "killed") == contents(tmp_path / "undisturbed")
