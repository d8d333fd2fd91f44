"""What the rows of a recipe may say, beyond their methods: checked here, and what they need of other rows."""

from typing import Any

from hf_freeze.methods._budget import check_budget
from hf_freeze.methods.base import Method
from hf_freeze.methods.order import needs_config
from hf_freeze.methods.registry import method_from_dict

OF_A_ROW = ("training", "backbone", "tokenizer")  # sections that a row may change

ROW_FIELDS = (
    "label",
    "methods",
    "start",
    "teacher",
    "targets",
    *OF_A_ROW,
    "heads",
    "head_scores",
    "layers",
    "calibration",
    "pictures",
)  # the first two are needed

HEAD_SCORES = ("importance", "ablation", "one_head")  # what can be measured of a finished run's heads
PICTURES = ("attention", "embeddings")  # what may be drawn of a finished run
HEAD_ORDERS = ("importance", "ablation", "random")  # by which heads are removed from what a run starts from
# By which layers of what a run starts from are kept; rates are those that LayerDrop has learnt.
LAYER_CHOICES = ("every_other", "removal", "similarity", "rates", "search")


def check_heads(row: dict[str, Any], rows: dict[str, Any], task: str, elsewhere: bool, path: Any) -> None:
    """`head_scores: [importance]`, and `heads: {by: importance, fraction: 0.3}`, which may name the `attentions` too."""
    for field in ("heads", "head_scores"):
        if field in row and task == "image-classification":
            raise ValueError(f"{path}: {field} is for transformers, not for task {task!r}")
    scores = row.get("head_scores", [])
    if not isinstance(scores, list) or any(score not in HEAD_SCORES for score in scores):
        raise ValueError(f"{path}: head_scores={scores!r} must be a list; choose from {list(HEAD_SCORES)}")
    if "heads" not in row:
        return
    heads = row["heads"]
    if not isinstance(heads, dict) or not {"by", "fraction"} <= set(heads) <= {"by", "fraction", "attentions"}:
        raise ValueError(f"{path}: heads={heads!r} must have 'by' and 'fraction', and may have 'attentions'")
    if heads["by"] not in HEAD_ORDERS:
        raise ValueError(f"{path}: unknown heads.by={heads['by']!r}; choose from {list(HEAD_ORDERS)}")
    if type(heads["fraction"]) is not float or not 0 < heads["fraction"] <= 1:
        raise ValueError(f"{path}: heads.fraction={heads['fraction']!r} must be a share in (0, 1]")
    attentions = heads.get("attentions", ["encoder.self"])
    if not isinstance(attentions, list) or not attentions or not all(isinstance(name, str) for name in attentions):
        raise ValueError(f"{path}: heads.attentions={attentions!r} must be a list such as ['encoder.self']")
    if elsewhere:
        return  # what is measured there is known when it is read
    if "start" not in row:
        raise ValueError(f"{path} has 'heads' but no 'start': they are removed from the model that it starts from")
    start = rows[row["start"]]
    if heads["by"] != "random" and heads["by"] not in (start.get("head_scores", []) if isinstance(start, dict) else []):
        raise ValueError(f"{path}: heads.by={heads['by']!r} is not in the head_scores of row {row['start']!r}")


def check_pictures(row: dict[str, Any], task: str, path: Any) -> None:
    """`pictures: [attention, embeddings]`."""
    if "pictures" not in row:
        return
    if task == "image-classification":
        raise ValueError(f"{path}: pictures is for transformers, not for task {task!r}")
    pictures = row["pictures"]
    if not isinstance(pictures, list) or any(picture not in PICTURES for picture in pictures):
        raise ValueError(f"{path}: pictures={pictures!r} must be a list; choose from {list(PICTURES)}")


def check_layers(row: dict[str, Any], task: str, elsewhere: bool, path: Any) -> None:
    """`layers: {by: search, keep: {encoder: 3}}`, which may name the number of `trials` of a search."""
    if "layers" not in row:
        return
    layers = row["layers"]
    if task == "image-classification":
        raise ValueError(f"{path}: layers is for transformers, not for task {task!r}")
    if not isinstance(layers, dict) or not {"by", "keep"} <= set(layers) <= {"by", "keep", "trials"}:
        raise ValueError(f"{path}: layers={layers!r} must have 'by' and 'keep', and may have 'trials'")
    if layers["by"] not in LAYER_CHOICES:
        raise ValueError(f"{path}: unknown layers.by={layers['by']!r}; choose from {list(LAYER_CHOICES)}")
    keep = layers["keep"]
    if not isinstance(keep, dict) or not keep or any(type(count) is not int or count < 1 for count in keep.values()):
        raise ValueError(f"{path}: layers.keep={keep!r} must be numbers of layers by stack, such as {{'encoder': 3}}")
    if "trials" in layers and (layers["by"] != "search" or type(layers["trials"]) is not int or layers["trials"] < 1):
        raise ValueError(
            f"{path}: layers.trials={layers['trials']!r} must be an integer of at least 1, with by: search"
        )
    if "start" not in row and not elsewhere:
        raise ValueError(f"{path} has 'layers' but no 'start': they are chosen from the model that it starts from")
    if "heads" in row:
        raise ValueError(f"{path} has both 'layers' and 'heads', which name layers by their old numbers; use two rows")


def check_calibration(row: dict[str, Any], task: str, trained: bool, path: Any) -> None:
    """`calibration: {texts: texts.txt, samples: 512, budget: 0.5}`: without texts, the training data; the budget is for methods
    with `share: auto`. `trained`: whether the row has weights to begin with."""
    if "calibration" not in row:
        check_shares(row["methods"], None, None, path)
        return
    settings = row["calibration"]
    if task == "image-classification":
        raise ValueError(f"{path}: calibration is for transformers, not for task {task!r}")
    if not isinstance(settings, dict) or not settings.keys() <= {"texts", "samples", "budget"}:
        raise ValueError(
            f"{path}: calibration={settings!r} may have 'texts', 'samples' and 'budget'; {{}} takes the training data"
        )
    texts = settings.get("texts", "texts.txt")
    named = [texts] if isinstance(texts, str) else texts
    if not isinstance(named, list) or not named or not all(isinstance(name, str) for name in named):
        raise ValueError(f"{path}: calibration.texts={texts!r} must be a file or a list of files")
    samples = settings.get("samples", 1)
    if type(samples) is not int or samples < 1:
        raise ValueError(f"{path}: calibration.samples={samples!r} must be an integer of at least 1")
    if not trained:
        raise ValueError(
            f"{path} has 'calibration' but neither 'start' nor 'backbone.pretrained': fresh weights have none"
        )
    check_shares(row["methods"], settings.get("budget"), settings, path)


def check_shares(methods: list[dict[str, Any]], budget: Any, calibration: Any, path: Any) -> None:
    """Raise ValueError, which names the row, unless a budget and `share: auto` come together."""
    try:
        check_budget([method_of(method) for method in methods], budget, calibration)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def check_pretrained(backbone: Any, path: Any, *, has_tokenizer: bool) -> None:
    """A backbone with weights has its own config and tokenizer."""
    if not isinstance(backbone, dict) or "pretrained" not in backbone:
        return
    if not isinstance(backbone["pretrained"], str):
        raise ValueError(
            f"{path}: backbone.pretrained={backbone['pretrained']!r} must be a folder or a name on the Hub"
        )
    for field in [*(f"backbone.{name}" for name in backbone if name != "pretrained"), *["tokenizer"] * has_tokenizer]:
        raise ValueError(f"{path} has both 'backbone.pretrained' and {field!r}: pretrained weights come with their own")


def check_from_scratch(row: dict[str, Any], trained: bool, path: Any) -> None:
    """Blocks that cannot take over weights, where a row has weights to begin with."""
    methods = [method_of(method) for method in row["methods"]]
    for number, method in enumerate(methods):
        if trained and needs_config(method, methods[:number]):
            raise ValueError(
                f"{path}: the blocks of method {method.name!r} train from scratch: it can have neither 'start' nor "
                "'backbone.pretrained'"
            )


def check_start(name: str, rows: dict[str, Any], path: Any) -> None:
    for section in ("backbone", "tokenizer"):
        if "start" in rows[name] and section in rows[name]:
            raise ValueError(
                f"{path} has both 'start' and {section!r}: it takes the {section} of the row that it starts from"
            )
    _check_way([name], rows, path)


def _check_way(way: list[str], rows: dict[str, Any], path: Any) -> None:
    """What a row starts from or learns from, and that in turn."""
    for field, needed in needed_rows(rows[way[-1]]).items():
        if not isinstance(needed, str) or needed not in rows:
            raise ValueError(f"{path}: {field}={needed!r} is no row; choose from {list(rows)}")
        if needed in way:
            raise ValueError(f"{path}: {field!r} refers to itself: {' <- '.join([*way, needed])}")
        _check_way([*way, needed], rows, path)


def needed_rows(row: Any) -> dict[str, Any]:
    """The rows whose models a row needs, by the field that names them."""
    return {field: row[field] for field in ("start", "teacher") if isinstance(row, dict) and field in row}


def check_teacher(row: dict[str, Any], task: str, path: Any) -> None:
    """`teacher: "0"`, a row whose model distillation learns from; with `targets: teacher`, from its translations."""
    distils = any(method["method"] == "distillation" for method in row["methods"])
    if "targets" in row and (row["targets"] != "teacher" or task != "translation"):
        raise ValueError(
            f"{path}: targets={row['targets']!r} must be 'teacher', and the task 'translation', not {task!r}"
        )
    if (distils or "targets" in row) != ("teacher" in row):
        raise ValueError(
            f"{path}: 'teacher' names the row that distillation learns from, among the methods or by targets: teacher; it has "
            + ("none of these" if "teacher" in row else "no 'teacher'")
        )
    if "teacher" in row and task == "image-classification":
        raise ValueError(f"{path}: teacher is for transformers, not for task {task!r}")


def method_of(data: Any, tokenizer: Any = None) -> Method:
    """The method of a row. Where it says `continuations: tokenizer`, they are those of the run's, if there is one yet."""
    if isinstance(data, dict) and data.get("continuations") == "tokenizer":
        from hf_freeze.analysis import word_continuations  # here: it imports much

        data = data | {"continuations": [] if tokenizer is None else word_continuations(tokenizer)}
    return method_from_dict(data)
