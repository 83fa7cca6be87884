"""Which arguments are activations: by their dimensions, and by the words of their names."""

import pytest

from hf_lowprec.casting.argument_roles import COMPUTED, NUMBERS, is_time, role_of


@pytest.mark.parametrize(
    "name",
    [
        *("class_weights", "pos_weight", "sample_weight", "sampleWeights", "posWeight", "temperature", "logit_scale"),
        *("t", "timestep", "timesteps", "time_step", "past_time_features", "sigma", "sigmas", "noise", "sigma_2"),
        *(
            "position_ids",
            "positions",
            "bbox",
            "input_boxes",
            "input_points",
            "coords",
            "num_items_in_batch",
            "numTokens",
        ),
        *("batch.timesteps", "options.class_weights.image", "second_per_grid_ts", "text_lengths", "numeric_values"),
    ],
)
@pytest.mark.parametrize("dims", [0, 1, 2, 4])
def test_numbers_by_name(name: str, dims: int) -> None:
    assert role_of(name, dims) == "number"


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("time_embeds", "activation"),
        ("position_bias", "activation"),
        ("target_mapping", "activation"),
        ("past_key_values", "activation"),
        ("point_features", "activation"),
        ("time_feats", "activation"),
        ("past_hidden", "activation"),
        ("num_feature", "activation"),
        ("feature_weights", "number"),  # the last word is the noun
        ("hidden_sizes", "number"),
        ("reference_points", "activation"),
        ("bottleneck", "activation"),  # words, not letters: "t", "ts"
        ("weighted", "activation"),
        ("attention_mask", "mask"),
        ("image_embeds_position_mask", "mask"),
        ("encoder_hidden_states_t5", "activation"),
        ("start_Labels", "reference"),
        ("target_boxes", "reference"),
        ("labels.masks", "reference"),
        ("label_weights", "reference"),
    ],
)
def test_other_names(name: str, role: str) -> None:
    assert role_of(name, 3) == role


@pytest.mark.parametrize(
    ("name", "roles"),
    [
        *((name, ["number", "number", "activation"]) for name in ("x", "", "pixel_values", "cond")),
        ("labels", ["reference"] * 3),
        ("sample_mask", ["number", "number", "mask"]),
    ],
)
def test_activations_and_masks_have_two_dimensions(name: str, roles: list[str]) -> None:
    assert [role_of(name, dims) for dims in range(3)] == roles


def test_every_word_stands_once() -> None:
    words = " ".join((*NUMBERS, *COMPUTED)).split()
    assert len(words) == len(set(words)) and all(word.isalpha() and word.islower() for word in words)


def test_points_in_time_are_no_embeddings_of_them() -> None:
    assert all(map(is_time, ("t", "time", "timesteps", "timestep", "guidance", "a_step", "inner.timesteps")))
    others = ("", "x", "text", "target", "time_ids", "step_ids", "timestep_cond", "time_mask", "y")
    assert not any(map(is_time, others))
