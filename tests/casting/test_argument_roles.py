"""Which arguments are activations, by their dimensions and names: among them every floating one of transformers."""

import inspect
import re
import sys

import pytest
import transformers
from transformers.utils import TransformersKwargs

from hf_lowprec.casting.argument_roles import COMPUTED, NUMBERS, is_time, role_of
from tests.support.every_architecture import forward_arguments
from tests.support.every_architecture.model_classes import classes_by_type

# Of a tensor that may be floating, of a result that holds one, of a number, of anything.
FLOATING = re.compile(r"(?<![A-Za-z])Tensor|FloatTensor|Output\b|\bfloat\b|\bAny\b")
LISTED = {
    "activation": " ".join(forward_arguments.ACTIVATIONS.values()).split(),
    "number": " ".join(forward_arguments.NUMBERS.values()).split(),
}
NOT_FLOATING = " ".join(forward_arguments.NOT_FLOATING.values()).split()
# Of other libraries and of users. "bottleneck" and "weighted": words count, not letters. The last word is the noun.
OTHERS = {
    "number": """class_weights pos_weight sampleWeights posWeight logit_scale t timesteps sigma sigmas sigma_2 positions
        coords numTokens batch.timesteps options.class_weights.image text_lengths feature_weights hidden_sizes""",
    "activation": "x cond time_embeds time_feats num_feature bottleneck weighted encoder_hidden_states_t5",
    "mask": "attention_mask bool_masked_pos bbox_first_token_mask padding_mask_videos sample_mask",
    "reference": "labels label_weights mask_labels targets target_embedding start_Labels target_boxes labels.masks",
}


@pytest.mark.parametrize("role", OTHERS)
def test_numbers_and_references_are_not_rounded_nor_what_has_fewer_than_two_dimensions(role: str) -> None:
    for name in [*LISTED.get(role, ()), *OTHERS[role].split()]:
        assert role_of(name, 3) == role_of(name, 2) == role, name
        assert {role_of(name, 0), role_of(name, 1)} == {"reference" if role == "reference" else "number"}, name


def test_every_word_and_every_argument_is_listed_once() -> None:
    words = " ".join((*NUMBERS, *COMPUTED)).split()
    assert len(words) == len(set(words)) and all(word.isalpha() and word.islower() for word in words)
    names = [*NOT_FLOATING, *(name for listed in LISTED.values() for name in listed)]
    assert len(names) == len(set(names)), sorted({name for name in names if names.count(name) > 1})


def test_points_in_time_are_no_embeddings_of_them() -> None:
    assert all(map(is_time, ("t", "time", "timesteps", "timestep", "guidance", "a_step", "inner.timesteps")))
    others = ("", "x", "text", "target", "time_ids", "step_ids", "timestep_cond", "time_mask", "y")
    assert not any(map(is_time, others))


def floating_arguments() -> dict[str, set[str]]:
    """Argument -> classes that have it, of the support table's and every model inside, whose calls round too."""
    names = {name for classes in classes_by_type().values() for name in classes}
    listed = {model for name in names if isinstance(model := getattr(transformers, name, None), type)}
    classes = set(listed)
    for module in {sys.modules[model.__module__] for model in listed if model.__module__ in sys.modules}:
        inside = [part for part in vars(module).values() if isinstance(part, type)]
        classes |= {part for part in inside if issubclass(part, transformers.PreTrainedModel)}
    annotated = TransformersKwargs.__annotations__.items()  # what any forward takes
    found = {name: {"TransformersKwargs"} for name, kind in annotated if FLOATING.search(str(kind))}
    for model in classes:
        try:
            parameters = list(inspect.signature(model.forward).parameters.values())[1:]
        except ImportError:  # an optional package is missing
            continue
        for p in parameters:
            plain = p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            if plain and (p.annotation is p.empty or FLOATING.search(str(p.annotation))):
                found.setdefault(p.name, set()).add(model.__name__)
    return found


@pytest.mark.every_case  # only another release of transformers can change it
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_argument_is_listed() -> None:
    names = {*NOT_FLOATING, *(name for listed in LISTED.values() for name in listed)}
    others = {name: found for name, found in floating_arguments().items() if not re.search("label|target|mask", name)}
    new = {name: sorted(classes)[:3] for name, classes in others.items() if name not in names}
    assert not new, f"say in forward_arguments.py what these arguments of transformers are: {new}"
