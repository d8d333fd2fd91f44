"""The freeze ablation as a plain Trainer script: one row, your own parallel text.

python train.py --source train.de.gz --target train.en.gz --dev-source val.de.gz --dev-target val.en.gz --ffn random
accelerate launch --num_processes 2 train.py --ffn random
python train.py --attention random --out runs/attention-random   # on the built-in corpus
"""

import argparse

import torch
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainingArguments

from hf_freeze import count_parameters, make_variant, methods
from hf_freeze.lab.data import builtin_corpus, read_parallel, train_tokenizer
from hf_freeze.lab.runs.text_training import backbone_config
from hf_freeze.lab.training import TokenBatchTrainer
from hf_freeze.training import label_smoothed_loss

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
for side in ("--source", "--target", "--dev-source", "--dev-target"):
    parser.add_argument(side, help="a text file, one sentence a line, plain or .gz; without any: the built-in corpus")
for component in ("embeddings", "attention", "ffn"):
    parser.add_argument(f"--{component}", default="trainable", help="trainable, frozen, random or (linears) diagonal")
for name, default in (("--vocab-size", 800), ("--width", 96), ("--max-tokens", 700), ("--seed", 1)):
    parser.add_argument(name, type=int, default=default)
parser.add_argument("--epochs", type=float, default=4)
parser.add_argument("--out", default="runs/train")


def main() -> None:
    options = parser.parse_args()
    if len({bool(options.source), bool(options.target), bool(options.dev_source), bool(options.dev_target)}) > 1:
        parser.error(
            "--source, --target, --dev-source and --dev-target go together: all four files, or the built-in corpus"
        )
    if options.source:
        train = read_parallel(options.source, options.target)
        dev = read_parallel(options.dev_source, options.dev_target)
    else:
        train, dev, _ = builtin_corpus().values()
    tokenizer = train_tokenizer([*train["source"], *train["target"]], options.vocab_size)
    sizes = {"layers": 2, "attention_heads": 4, "ffn_dim": 4 * options.width}
    config = {f"{stack}_{name}": size for stack in ("encoder", "decoder") for name, size in sizes.items()}
    config |= {"d_model": options.width, "max_position_embeddings": 256, "scale_embedding": True, "dropout": 0.0}
    config = backbone_config({"model_type": "marian", "config": config}, tokenizer)
    frozen = {component: getattr(options, component) for component in ("embeddings", "attention", "ffn")}
    freeze = methods.Freeze(**frozen, seed=options.seed)
    model = make_variant(config, [freeze], task="seq2seq-lm", init="marian", seed=options.seed)
    tokenizer.model_max_length = config.max_position_embeddings

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        sides = {"input_ids": batch["source"], "labels": batch["target"]}
        return {column: tokenizer(texts, truncation=True)["input_ids"] for column, texts in sides.items()}

    train, dev = (split.map(encode, batched=True, remove_columns=["source", "target"]) for split in (train, dev))
    arguments = Seq2SeqTrainingArguments(
        output_dir=options.out,
        num_train_epochs=options.epochs,
        learning_rate=3e-3,
        warmup_steps=100,
        adam_beta2=0.98,
        eval_strategy="epoch",
        seed=options.seed,
        accelerator_config={"even_batches": False},
        use_cpu=not torch.cuda.is_available(),
        use_cache=True,
    )
    trainer = TokenBatchTrainer(
        model=model,
        args=arguments,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
        train_dataset=train,
        eval_dataset=dev,
        compute_loss_func=label_smoothed_loss(0.1),
        max_tokens=options.max_tokens,
    )
    trainer.train()
    trainer.save_model(options.out)  # with the tokenizer, from one process
    if trainer.is_world_process_zero():
        print(f"{count_parameters(model).trainable:,} parameters trained; {trainer.state.log_history[-1]}")


if __name__ == "__main__":
    main()
