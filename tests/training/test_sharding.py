"""Models in shards: what each process holds is its part of the whole model, and training gives what one process gives."""

import json
import shutil

import pytest
import torch
from support.cases import once, plain
from support.children.sharding import DECODING, IDS, SENTENCES, STEPS, optimizer_of, train
from support.models import build, native, perturbed
from support.processes import two_processes
from transformers import MarianConfig, MarianMTModel

from hf_freeze import data, make_variant
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.lab.training.decoding import translate
from hf_freeze.methods import Freeze, LowRank


def trained_variant():
    methods = [Freeze(ffn="random", embeddings="frozen"), LowRank(rank=3, components=["attention"])]
    return make_variant(native(plain(ARCHITECTURES["llama"])), methods)


@pytest.fixture(scope="module")
def losses():
    """Of one process, that goes on after the steps that two do."""
    model = trained_variant().train()
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        return train(model, optimizer := optimizer_of(model), IDS), train(model, optimizer, IDS)
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture
def translated(tmp_path):
    """What one process makes of SENTENCES by the model in the folder `translator`."""
    tokenizer = data.train_tokenizer(SENTENCES, 60)
    sizes = {"vocab_size": len(tokenizer), "decoder_vocab_size": len(tokenizer)}
    torch.manual_seed(2)
    backbone = MarianMTModel(
        MarianConfig(**ARCHITECTURES["marian"].tiny | sizes, init_std=0.8)
    )  # no text is like another
    model = make_variant(perturbed(backbone), [Freeze(ffn="random"), LowRank(rank=3, components=["attention"])])
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path / "translator")
    texts = translate(model, tokenizer, SENTENCES, **DECODING)
    assert len(set(texts)) > 4
    return texts


def test_two_processes_train_as_one_and_three_go_on(tmp_path, losses, translated):
    for number, case in enumerate(once()):
        build(case).save_pretrained(tmp_path / f"variant-{number}")
    trained_variant().save_pretrained(tmp_path / "variant-trained")
    first, second = losses
    for count, expected in ((2, first), (3, second)):
        results = two_processes("sharding", tmp_path, count)
        for result in results:
            assert result["problems"] == []
            assert result["losses"] == pytest.approx(expected, rel=1e-4)
        for folder in tmp_path.glob("variant-[0-9]*"):
            shutil.rmtree(folder)
        if count == 3:
            for result in results:
                assert result["translations"] == dict.fromkeys(
                    ("whole", "in shards", "teacher", "again", "in the file"), translated
                )
            assert sum(result["read"] for result in results) == len(SENTENCES)
            assert all(result["read"] for result in results)
    assert len(first) == STEPS
    assert second[0] < first[0]


def test_a_wrong_digest_is_found(tmp_path):
    trained_variant().save_pretrained(tmp_path / "variant-trained")
    config = tmp_path / "variant-trained" / "config.json"
    fields = json.loads(config.read_text())
    fields["digests"] = dict.fromkeys(fields["digests"], "0" * 32)
    config.write_text(json.dumps(fields))
    with pytest.raises(AssertionError, match="digest mismatch: the regenerated tensor"):
        two_processes("sharding", tmp_path)
