"""Write `docs/model-support.md`: cast and train every model class of transformers, and tabulate which of them train.

    python -m tools.model_support [--write] [model_type or class …]

Without `--write` the page is printed; with names, only those are tried.
`tests/casting/test_every_architecture.py` compares the page with one class of every model type.
"""

import argparse
import itertools
import re
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
import transformers

from tests.support.every_architecture.architecture_check import FAILS, NO_REFERENCE, TRAINS, Outcome
from tests.support.every_architecture.model_classes import classes_by_type, try_class

PAGE = Path(__file__).resolve().parents[1] / "docs" / "model-support.md"
COMMAND = "python -m tools.model_support --write"
TITLES = {"Trains": TRAINS, "Does not train": FAILS, "Not compared": NO_REFERENCE}
HEAD = """\
# Model support

**{trains} of {compared} classes of transformers' models train in BF16 after `cast_model` ({percent}%)**, and
{types} of {all_types} model types with all their classes. Look for your model's type, `model.config.model_type`, in
the [first table](#trains). A model that is not listed, or of your own, is cast by the same rules
([casting](concepts/casting.md)); if one of its layers fails, the error names the layer and the `keep_fp32=` that
helps.

{rest} further classes are [not compared](#not-compared): with a tiny config and an invented batch they do not train
in FP32 either, for the reason given with each. The cast is not that reason.

## What was tested

Every class in transformers' model mappings was built with a tiny config, trained for one step in FP32, cast with
`cast_model`, and trained for the same step with `hf_lowprec.AdamW`, with SDPA and with eager attention where it has
both. It *trains* if

- nothing fails,
- the loss is FP32's up to rounding, by a bound from the FP32 gradients and BF16's unit roundoff, 2⁻⁸,
- norms and rotary tables are FP32 and unchanged, everything else is BF16, and norms return BF16,
- tied weights are still tied,
- every parameter that has a gradient in FP32 has a finite one in its own dtype.

Activations among the inputs are rounded to BF16. Labels, numbers, weights and positions arrive as they are, by the
[rule for inputs](concepts/casting.md#what-enters-a-model). One step of a tiny model says that training works, not
how accurate a long one is; for that see [performance and evidence](performance.md).

Notes in the tables: *text alone*, the model also takes images or sound, which the batch lacks; *without labels*,
the loss is the mean square of what the model returns.

This page is written by `{command}`, here with transformers {transformers} and torch {torch} on a CPU.
"""


def walk(chosen: list[str]) -> dict[str, dict[str, Outcome]]:
    """Every class of every model type, with its default attention and with eager attention."""
    outcomes: dict[str, dict[str, Outcome]] = {}
    for model_type, classes in classes_by_type().items():
        for name in classes:
            if chosen and not {model_type, name} & set(chosen):
                continue
            start = time.perf_counter()
            two = getattr(getattr(transformers, name, None), "_supports_sdpa", False)
            outcome = try_class(name, model_type, (None, "eager") if two else (None,))
            outcomes.setdefault(model_type, {})[name] = outcome
            words = f"{model_type} {name}: {outcome.kind} ({outcome.note}) {outcome.error:.2f}"
            print(f"{words} {time.perf_counter() - start:.2f} s", file=sys.stderr, flush=True)
    return outcomes


def page(outcomes: dict[str, dict[str, Outcome]]) -> str:
    """The page's text, from the outcomes by model type and class."""
    kinds = Counter(outcome.kind for classes in outcomes.values() for outcome in classes.values())
    types = Counter(
        TRAINS if all(kinds == TRAINS for kinds in compared) else FAILS
        for classes in outcomes.values()
        if (compared := [outcome.kind for outcome in classes.values() if outcome.kind != NO_REFERENCE])
    )
    compared = kinds[TRAINS] + kinds[FAILS]
    tables = [(title, _table(outcomes, kind)) for title, kind in TITLES.items()]
    head = HEAD.format(
        command=COMMAND,
        transformers=transformers.__version__,
        torch=torch.__version__.partition("+")[0],
        trains=kinds[TRAINS],
        compared=compared,
        percent=f"{100 * kinds[TRAINS] / max(compared, 1):.1f}",
        types=types[TRAINS],
        all_types=types[TRAINS] + types[FAILS],
        rest=kinds[NO_REFERENCE],
    )
    return head + "".join(f"\n## {title}\n\n" + "\n".join(lines) + "\n" for title, lines in tables)


def _table(outcomes: dict[str, dict[str, Outcome]], kind: str) -> list[str]:
    lines = ["| model type | classes | note |", "|---|---|---|"]
    for model_type, classes in outcomes.items():
        notes: dict[str, list[str]] = {}
        for name, outcome in classes.items():
            if outcome.kind == kind:
                notes.setdefault(_shortened(outcome.note), []).append(name)
        lines += [f"| {model_type} | {_joined(names)} | {note} |" for note, names in notes.items()]
    return lines if len(lines) > 2 else ["None."]


def _shortened(note: str) -> str:
    if found := re.search(r"requires the (\w+) library", note):
        return f"needs {found[1]}"
    note = re.sub(r"^(RuntimeError: )(?=\w+Error: )", "", note).replace("|", "/").replace("`", "")
    return re.sub(r"<[^>]*>", "…", note)[:110].strip()


def _joined(names: list[str]) -> str:
    """Class names, with what they begin with in common written once: `Llama: ForCausalLM, Model`."""
    start = "".join(
        letters[0] for letters in itertools.takewhile(lambda x: len(set(x)) == 1, zip(*names, strict=False))
    )
    rests = [name[len(start) :] for name in names]
    clear = len(names) > 1 and start and all(rest[:1].isupper() for rest in rests)
    return f"{start}: {', '.join(rests)}" if clear else ", ".join(names)


def read(text: str) -> dict[tuple[str, str], str]:
    """The kinds of outcome on a page, by model type and class: the inverse of `page`."""
    found, kind = {}, ""
    for line in text.splitlines():
        if line.startswith("## "):
            kind = TITLES.get(line[3:], "")
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 5 and kind and cells[1] not in ("model type", "---"):
            start, colon, rest = cells[2].rpartition(": ")
            for name in rest.split(", "):
                found[cells[1], start + name if colon else name] = kind
    return found


def version_of(text: str) -> str:
    """The version of transformers that a page was written with."""
    found = re.search(r"with transformers (\S+) and", text)
    return found[1] if found else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name} instead of printing it")
    parser.add_argument("names", nargs="*", help="model types or classes; all of them without")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity(50)
    text = page(walk(options.names))
    if options.write:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
