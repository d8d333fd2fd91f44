"""A training step in bf16 and in fp32 on this machine.

    python benchmarks/precision.py --preset tiny
    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 python benchmarks/precision.py --preset tiny

Claim: `training.bf16: auto` chooses the faster one. Method: the same steps (forward, loss, backward, AdamW) of row 0 of the
freeze ablation on batches of the built-in corpus, in bf16 autocast and in fp32 in turn, `--rounds` times. On a CPU the time is
processor time, so that other work on the machine adds little. The second command limits a newer CPU to AVX2, which has no bf16
products.
"""

import statistics
import time

import _shared
import torch
from transformers import DataCollatorForSeq2Seq

from hf_freeze import make_variant
from hf_freeze.lab import data
from hf_freeze.lab.runs.text_training import choose_attention
from hf_freeze.lab.tasks import translation
from hf_freeze.lab.training.precision import has_native_bf16

VOCABULARY = 800  # of the tokenizer; the tables of the model have the preset's


def seconds() -> float:
    _shared.synchronize()
    return time.perf_counter() if torch.cuda.is_available() else time.process_time()


def main() -> None:
    parser = _shared.parser(__doc__)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    run = _shared.rows(options)["0"]
    text = data.builtin_corpus()["train"]
    tokenizer = data.train_tokenizer([*text["source"], *text["target"]], VOCABULARY)
    config = _shared.config_of(run, run.tokenizer.vocab_size)
    config.pad_token_id = config.decoder_start_token_id = tokenizer.pad_token_id
    tokenizer.model_max_length = config.max_position_embeddings
    model = make_variant(config, [], task="seq2seq-lm", init="marian").to(_shared.DEVICE).train()
    choose_attention(model)
    encoded = translation.encode(text, tokenizer)
    sources, targets = ([len(ids) for ids in encoded[column]] for column in ("input_ids", "labels"))
    sampler = data.TokenBatchSampler(sources, targets, run.training.max_tokens, seed=1)
    collator = DataCollatorForSeq2Seq(tokenizer, model=model)
    batches = [
        collator(encoded.__getitems__(indices)).to(_shared.DEVICE)
        for _, indices in zip(range(options.batches), sampler, strict=False)
    ]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def step(batch: dict[str, torch.Tensor], bf16: bool) -> float:
        start = seconds()
        with torch.autocast(_shared.DEVICE, torch.bfloat16, enabled=bf16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return seconds() - start

    times: dict[bool, list[float]] = {True: [], False: []}
    for bf16 in times:
        step(batches[0], bf16)
    for number in range(options.rounds):
        for bf16 in (True, False) if number % 2 else (False, True):
            times[bf16] += [step(batch, bf16) for batch in batches]
    tokens = statistics.fmean(int((batch["labels"] != -100).sum()) for batch in batches)
    medians = {bf16: statistics.median(values) for bf16, values in times.items()}
    lines = [
        [
            "bf16" if bf16 else "fp32",
            f"{1e3 * median:.0f} ({_shared.quartiles([1e3 * t for t in times[bf16]], 0)})",
            f"{tokens / median:,.0f}",
            "chosen" if bf16 == has_native_bf16() else "–",
        ]
        for bf16, median in medians.items()
    ]
    header = ["precision", "ms a step (quartiles)", "target tokens a second", "`auto`"]
    ratio = medians[True] / medians[False]
    right = (ratio < 1) == has_native_bf16()
    summary = f"bf16 takes {ratio:.2f} times as long as fp32; claim: {'passed' if right else 'missed'}"
    _shared.report(options, _shared.markdown(header, lines), summary)


if __name__ == "__main__":
    main()
