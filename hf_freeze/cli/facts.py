"""What commands that only tell know of methods and architectures, from `facts.json`: so they import no torch and no transformers.

`python docs/tooling/method_guides.py` writes the file from the registries.
"""

import functools
import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("facts.json")


@functools.cache
def read() -> dict[str, Any]:
    """ "methods": name -> its facts; "architectures": name -> its tasks and stacks; "formats": those of export.
    docs/tooling/registry_facts.py lists them."""
    return json.loads(FILE.read_text(encoding="utf-8"))
