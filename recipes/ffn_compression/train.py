"""FFN compression as a plain Trainer script: one method, from scratch or from a trained model, on your own parallel text.

python train.py --methods '[{"method": "tensor_train", "rank": 2}]'                       # on the built-in corpus
python train.py --methods '[{"method": "magnitude_pruning", "sparsity": 0.9}]' --start runs/ffn-compression/row-0-seed-1/model
"""

import argparse
import json

import torch
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, Seq2SeqTrainingArguments

from hf_freeze import VariantCallback, count_parameters, make_variant, stored_bytes
from hf_freeze.lab.data import builtin_corpus, read_parallel, train_tokenizer
from hf_freeze.lab.runs.text_training import backbone_config
from hf_freeze.lab.training import TokenBatchTrainer
from hf_freeze.methods.registry import method_from_dict
from hf_freeze.training import label_smoothed_loss

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
for side in ("--source", "--target", "--dev-source", "--dev-target"):
    parser.add_argument(side, help="a text file, one sentence a line, plain or .gz; without any: the built-in corpus")
parser.add_argument("--methods", type=json.loads, default=[{"method": "low_rank", "rank": 19}], help="as in a recipe")
parser.add_argument("--start", help="a trained model to compress; without: fresh weights")
for name, default in (("--vocab-size", 800), ("--width", 96), ("--max-tokens", 700), ("--seed", 1), ("--epochs", 3)):
    parser.add_argument(name, type=int, default=default)
parser.add_argument("--out", default="runs/train-ffn")


def main() -> None:
    options = parser.parse_args()
    if len({bool(options.source), bool(options.target), bool(options.dev_source), bool(options.dev_target)}) > 1:
        parser.error(
            "--source, --target, --dev-source and --dev-target go together: all four files, or the built-in corpus"
        )
    train, dev, _ = builtin_corpus().values()
    if options.source:
        train = read_parallel(options.source, options.target)
        dev = read_parallel(options.dev_source, options.dev_target)
    methods = list(map(method_from_dict, options.methods))
    if options.start:
        tokenizer = AutoTokenizer.from_pretrained(options.start)
        model = make_variant(options.start, methods, task="seq2seq-lm")
    else:
        tokenizer = train_tokenizer([*train["source"], *train["target"]], options.vocab_size)
        sizes = {"layers": 2, "attention_heads": 4, "ffn_dim": 4 * options.width}
        config = {f"{stack}_{name}": size for stack in ("encoder", "decoder") for name, size in sizes.items()}
        config |= {"d_model": options.width, "max_position_embeddings": 256, "scale_embedding": True}
        config = backbone_config({"model_type": "marian", "config": config}, tokenizer)
        tokenizer.model_max_length = config.max_position_embeddings
        model = make_variant(config, methods, task="seq2seq-lm", init="marian", seed=options.seed)

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return tokenizer(batch["source"], text_target=batch["target"], truncation=True)

    train, dev = (split.map(encode, batched=True, remove_columns=["source", "target"]) for split in (train, dev))
    arguments = Seq2SeqTrainingArguments(
        output_dir=options.out,
        num_train_epochs=options.epochs,
        learning_rate=1e-3 if options.start else 3e-3,
        seed=options.seed,
        accelerator_config={"even_batches": False},
        use_cpu=not torch.cuda.is_available(),
        use_cache=True,
    )
    trainer = TokenBatchTrainer(
        model=model,
        args=arguments,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        train_dataset=train,
        eval_dataset=dev,
        compute_loss_func=label_smoothed_loss(0.1),
        max_tokens=options.max_tokens,
        callbacks=[VariantCallback()],
    )
    trainer.train()
    if model.finalizable:
        model.finalize()  # masks are fixed, and what is left is stored sparse
    trainer.save_model(options.out)
    print(f"{count_parameters(model).total:,} parameters, {stored_bytes(model):,} bytes", trainer.evaluate())


if __name__ == "__main__":
    main()
