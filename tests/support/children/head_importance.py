"""Child of analysis/test_head_importance.py: one of two processes, each of which has one row of the batch."""

import json
import sys
from pathlib import Path

import torch.distributed as dist

from hf_freeze.analysis import head_importance
from hf_freeze.architectures.registry import ARCHITECTURES
from support.cases import plain
from support.models import native

if __name__ == "__main__":
    dist.init_process_group("gloo")
    case = plain(ARCHITECTURES["marian"])
    mine = {name: value[dist.get_rank() : dist.get_rank() + 1] for name, value in case.batch().items()}
    scores = head_importance(native(case), [mine], normalize="none")
    Path(sys.argv[1]).write_text(json.dumps({name: values.tolist() for name, values in scores.items()}))
    dist.destroy_process_group()
