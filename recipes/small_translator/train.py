"""Make a trained translator small for your text, as a plain Trainer script: leave out the tokens that the text does not need,
apply methods, train on, and leave a directory that `pipeline("translation")` opens.

hf-freeze run recipes/small_translator/recipe.yaml --set 'only=["0"]'                                 # something to start from
python train.py --start runs/small-translator/row-0-seed-1/model                                      # the built-in corpus
python train.py --start Helsinki-NLP/opus-mt-de-en --source train.de --target train.en --coverage 0.999 \\
    --methods '[{"method": "layer_selection", "keep": {"decoder": [0, 5]}}]'
"""

import argparse
import json

import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    pipeline,
)

from hf_freeze import VariantCallback, analysis, count_parameters, make_variant, stored_bytes
from hf_freeze.lab.data import builtin_corpus, read_parallel, trim_tokenizer
from hf_freeze.methods.registry import method_from_dict

EXAMPLE = [{"method": "factorized_embedding", "rank": 24}]
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--start", required=True, help="a trained translator, with its tokenizer")
for side in ("--source", "--target"):
    parser.add_argument(side, help="a text file, one sentence a line, plain or .gz; without any: the built-in corpus")
parser.add_argument("--coverage", type=float, default=1.0, help="share of the text's tokens to keep; 0: all")
parser.add_argument("--methods", type=json.loads, default=EXAMPLE, help="as in a recipe")
for name, default in (("--epochs", 1.0), ("--learning-rate", 1e-3)):
    parser.add_argument(name, type=float, default=default)
parser.add_argument("--batch-size", type=int, default=32, help="sentences, for each device")
parser.add_argument("--out", default="runs/train-small")


def main() -> None:
    options = parser.parse_args()
    if bool(options.source) != bool(options.target):
        parser.error("--source and --target go together: both files, or the built-in corpus")
    train = read_parallel(options.source, options.target) if options.source else builtin_corpus()["train"]
    tokenizer = AutoTokenizer.from_pretrained(options.start)
    dense = AutoModelForSeq2SeqLM.from_pretrained(options.start)
    methods = [method_from_dict(method) for method in options.methods]
    if options.coverage:
        sides = {"texts": train["source"], "targets": train["target"]}
        trimming = analysis.choose_vocabulary(tokenizer, **sides, coverage=options.coverage)
        tokenizer, methods = trim_tokenizer(tokenizer, trimming.keep), [trimming, *methods]
    model = make_variant(dense, methods)
    for name, each in (("before", dense), ("now", model)):
        print(f"{name}: {count_parameters(each).total:,} parameters, {stored_bytes(each):,} bytes")

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return tokenizer(batch["source"], text_target=batch["target"], truncation=True)

    trainer = Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(
            output_dir=options.out,
            num_train_epochs=options.epochs,
            learning_rate=options.learning_rate,
            per_device_train_batch_size=options.batch_size,
            use_cpu=not torch.cuda.is_available(),
        ),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        train_dataset=train.map(encode, batched=True, remove_columns=["source", "target"]),
        callbacks=[VariantCallback()],
    )
    trainer.train()
    if model.finalizable:
        model.finalize()
    trainer.save_model(options.out)
    translator = pipeline("translation", model=options.out)
    print(train["source"][0], "->", translator(train["source"][0])[0]["translation_text"])


if __name__ == "__main__":
    main()
