"""What `hf_freeze.compress` makes of small models of six tasks, from inputs without labels.

    python benchmarks/compressed_tasks.py --mnist MNIST
    python benchmarks/compressed_tasks.py --tasks tags --steps 30 --budget 60%

Claims: none; the table says what comes of it.

Each model is small and trained here, by its labels, for some minutes: a BERT that tags who has what in made-up sentences; one
that is asked who has it; a GPT-2 that writes such sentences; a Marian that says them in other words; a Whisper that writes down
the digits that it hears, each a chord of its own among noise; a ViT on MNIST. It is then compressed from inputs alone, and both
are scored in their engine on inputs that neither saw. Columns:

- folder: MB of all files, tokenizer included;
- score: of the labels, % of words, questions, sentences, digits or images that are right, of the GPT-2 the mean probability of
  the word that follows, in %; and its difference from the model's in points with a 95 % interval, by a paired bootstrap over
  inputs;
- fidelity: to the model's answers, on other inputs that took no part (`analysis.answers`);
- seconds: of the compression, the training of the model not included.
"""

import json
import tempfile
from pathlib import Path

import _shared
import numpy as np
from _small_models import TEXTS, add_options, trained
from compressed_texts import interval

import hf_freeze
from hf_freeze.compression.budget import Budget
from hf_freeze.publish.export.served import answers, opened


def main() -> None:
    parser = _shared.parser(__doc__, presets=False)
    add_options(parser)
    parser.add_argument("--budget", default="12%", help="of bytes, such as 12%% (of the model's) or 300kB")
    parser.add_argument("--heal", default="0", help="0, 10min or 1epoch")
    parser.add_argument(
        "--keep", type=Path, help="folder for models and compressions; a run that was stopped goes on there"
    )
    options = parser.parse_args()
    table = []
    for task in options.tasks:
        with tempfile.TemporaryDirectory() as temporary:
            folder = (options.keep or Path(temporary)) / task
            source = folder / "model"
            taught = trained(task, options, source)
            made = hf_freeze.compress(
                source,
                texts=taught.inputs,
                budget=Budget(max_bytes=options.budget),
                out=folder / f"{options.budget.strip('%')}-heal-{options.heal}",
                heal=0 if options.heal == "0" else options.heal,
            )
            before = np.array(taught.right(answers(opened(source), taught.tested).items))
            table.append(
                [f"{task}, the model", f"{made.original_bytes / 1e6:.2f}", f"{100 * before.mean():.2f}", "", "", ""]
            )
            for label, served, seconds in (
                ("whole, int8", made.whole, ""),
                (f"{options.budget}: {made.kept}", made.after, f"{made.seconds:.0f}"),
            ):
                after = np.array(taught.right(answers(opened(served.folder), taught.tested).items))
                change = interval(100 * (after - before))
                fidelity = f"{served.fidelity.score:.4f}"
                table.append(
                    [label, f"{served.bytes / 1e6:.2f}", f"{100 * after.mean():.2f}", change, fidelity, seconds]
                )
        print(json.dumps(table[-3:]), flush=True)
    headings = ["", "folder, MB", "score, %", "difference", "fidelity", "seconds"]
    _shared.report(
        options, _shared.markdown(headings, table), f"{TEXTS:,} inputs without labels, of speech a quarter as many"
    )


if __name__ == "__main__":
    main()
