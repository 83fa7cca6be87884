"""The generator of `docs/model-support.md`."""

import transformers

from tests.support.every_architecture.architecture_check import FAILS, NO_REFERENCE, TRAINS, Outcome
from tests.support.processes import forkserver
from tools import model_support


def test_it_prints_the_page_of_the_classes_named():
    script = forkserver.ROOT / "tools" / "model_support.py"
    done = forkserver.run(script, ["BertModel", "ViTModel"], timeout=120)
    assert done.returncode == 0, done.stderr
    assert model_support.read(done.stdout) == ({"bert", "vit"}, {})
    assert model_support.version_of(done.stdout) == transformers.__version__


def test_reading_is_the_inverse_of_writing() -> None:
    outcomes = {
        "llama": {
            "LlamaForCausalLM": Outcome(TRAINS, ""),
            "LlamaModel": Outcome(TRAINS, "text alone"),
        },
        "fnet": {"FNetModel": Outcome(FAILS, "a | b: `c`"), "Other": Outcome(TRAINS, "x")},
        "detr": {"Detr": Outcome(NO_REFERENCE, "requires the timm library")},
    }
    text = model_support.page(outcomes)
    others = {("fnet", "FNetModel"): FAILS, ("detr", "Detr"): NO_REFERENCE}
    assert model_support.read(text) == ({"llama", "fnet"}, others)
    assert "fewer inputs than they accept: 1 *text alone*, 1 *x*." in text
    assert model_support.version_of(text) == transformers.__version__
    assert "3 of 4 compared model classes" in text and "1 of 2 model types" in text and "needs timm" in text
