"""Time and GPU memory of calibrated cuts of a Llama of 1.24 billion fresh weights, in bf16. Quality means nothing here.

python benchmarks/calibration/large.py
"""

import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_freeze import make_variant, methods

CUTS = (
    methods.FFNPruning(width=4096),
    methods.HeadPruning(share=0.5),
    methods.Quantize(weights="int4", granularity="group-64"),
    methods.LowRank(rank=512),
)


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=128256,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    batches = [{"input_ids": torch.randint(0, config.vocab_size, (8, 512))} for _ in range(16)]
    print(torch.cuda.get_device_name(), torch.__version__, f"{model.num_parameters():,} parameters")
    for method in CUTS:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        variant = make_variant(model, [method], calibration=batches)
        torch.cuda.synchronize()
        report, peak = variant.calibration_report, torch.cuda.max_memory_allocated() / 2**30
        print(
            f"{method}: {time.perf_counter() - start:.1f} s, at most {peak:.1f} GiB, {report.tokens:,} tokens, {report.notes}"
        )


if __name__ == "__main__":
    main()
