"""benchmarks/peers/accepted.py: what it counts as taken, and as opened again."""

import pytest
import torch


@pytest.fixture
def benchmark(peer_script):
    return peer_script("accepted")


@pytest.fixture
def bert(benchmark, tmp_path):
    """The folder of a small BERT."""
    benchmark.make("bert", tmp_path / "models" / "bert")
    return tmp_path / "models" / "bert"


def test_a_tool_that_halves_and_opens_again_is_counted(benchmark, tmp_path, monkeypatch, capsys):
    arguments = ["--peers", "hf_freeze", "--models", "bert", "llama", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["accepted.py", *arguments])
    benchmark.main()
    assert "| hf_freeze, `FFNPruning` | 2 | 2 | a folder for `from_pretrained` | 3 | – |" in capsys.readouterr().out
    records = (tmp_path / "records.json").read_text()
    benchmark.main()  # nothing is left to do
    assert (tmp_path / "records.json").read_text() == records


def test_a_tool_that_removes_nothing_is_not_counted(benchmark, bert, tmp_path):
    idle = benchmark.halve.Peer("idle", lambda model, inputs, ffns: model)
    with pytest.raises(ValueError, match="0% of the FFN parameters are gone"):
        benchmark.halve.halved(idle, bert, tmp_path)


def test_a_model_that_opens_with_other_weights_is_not_counted(benchmark, bert, tmp_path):
    peer = benchmark.halve.PEERS["hf_freeze"]
    benchmark.halve.halved(peer, bert, tmp_path)
    assert benchmark.halve.opened(peer, bert, tmp_path) == {}
    torch.save(torch.load(tmp_path / "outputs.pt") + 1, tmp_path / "outputs.pt")
    with pytest.raises(ValueError, match="another output"):
        benchmark.halve.opened(peer, bert, tmp_path)


def test_an_environment_that_is_missing_is_named(benchmark, tmp_path, monkeypatch):
    arguments = ["--peers", "optipfair", "--models", "bert", "--out", str(tmp_path), "--environments", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["accepted.py", *arguments])
    with pytest.raises(SystemExit, match=r"optipfair/bin/python is missing: run this with --install optipfair"):
        benchmark.main()
