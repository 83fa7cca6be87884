"""One class of a model type of transformers, against the page that says which of them train.

The short suite takes types that train in a second or less and that reach between them every branch of
`hf_lowprec.casting` that any type reaches, and every kind of entry in `listed_classes`; `make test-all` takes all.
"""

import warnings
from collections.abc import Iterator

import pytest
import transformers

from tests.support.broken_layers import report
from tests.support.chosen_cases import EVERY_CASE
from tests.support.every_architecture.architecture_check import FAILS, NO_REFERENCE, TRAINS
from tests.support.every_architecture.batch_exceptions import LONG
from tests.support.every_architecture.model_classes import classes_by_type, main_class, try_class
from tools import model_support

TEXT = model_support.PAGE.read_text(encoding="utf-8")
TYPES_THAT_TRAIN, OTHERS = model_support.read(TEXT)
SAME_VERSION = model_support.version_of(TEXT) == transformers.__version__
TYPES = classes_by_type()
SAID = {
    (model_type, name): OTHERS.get((model_type, name), TRAINS if model_type in TYPES_THAT_TRAIN else None)
    for model_type, names in TYPES.items()
    for name in names
}
REPRESENTATIVES = (
    *("autoformer", "bit", "bros", "clvp", "convbert", "deepseek_v4", "diffllama", "distilbert", "edgetam", "fnet"),
    *("fun_asr_nano_encoder", "minimax_m3_vl", "mra", "sam", "timesfm", "tipsv2", "xlnet", "xlstm"),
)
ADVICE = f"if that is right, write the page anew: {model_support.COMMAND}"


@pytest.fixture(autouse=True, scope="module")
def silence() -> Iterator[None]:
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(50)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    transformers.logging.set_verbosity(level)


@pytest.mark.parametrize("model_type", [name for name in TYPES if EVERY_CASE or name in REPRESENTATIVES])
def test_trains_as_the_page_says(model_type: str) -> None:
    name = main_class(TYPES[model_type])
    said = SAID[model_type, name]
    if model_type in LONG or (said is None and not SAME_VERSION):
        return  # walked for the page only; or not there in the version the page was written with
    outcome = try_class(name, model_type)
    report(name, outcome.broken)
    found = (
        f"{name} ({model_type}): {outcome.kind}, {outcome.note or 'no note'}; {model_support.PAGE.name} says: {said}"
    )
    if not SAME_VERSION or (said == NO_REFERENCE and outcome.kind == TRAINS):
        # Configs differ between versions, optional packages between machines: only the cast is ours.
        assert outcome.kind != FAILS or said == FAILS, found
    else:
        assert outcome.kind == said, f"{found}; {ADVICE}"


@pytest.mark.skipif(not SAME_VERSION, reason="the page was written with another version of transformers")
def test_the_page_has_every_class() -> None:
    unknown = [where for where, kind in SAID.items() if kind is None]
    gone = [*(OTHERS.keys() - SAID.keys()), *(TYPES_THAT_TRAIN - TYPES.keys())]
    assert (unknown, gone) == ([], []), ADVICE
    kinds = [*SAID.values()]
    assert f"**{kinds.count(TRAINS)} of {len(kinds) - kinds.count(NO_REFERENCE)} classes" in TEXT, ADVICE


def test_enough_train() -> None:
    kinds = [kind for kind in SAID.values() if kind != NO_REFERENCE]
    assert kinds.count(TRAINS) >= 0.95 * len(kinds) and len(kinds) > 500
