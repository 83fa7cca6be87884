"""Names in messages are short: one entry for a tensor of several layers."""

from hf_lowprec.tensor_names import listed


def test_layers_are_ranges():
    names = [f"model.layers.{k}.mlp.up_proj.weight" for k in (0, 1, 2, 5, 10, 11)]
    assert listed([*names, "lm_head.weight"]) == "model.layers.0-2,5,10-11.mlp.up_proj.weight, lm_head.weight"


def test_long_lists_are_cut():
    names = [f"{letter}.{k}.weight" for letter in "abcdef" for k in range(3)]
    assert listed(names) == "a.0-2.weight, b.0-2.weight, c.0-2.weight, d.0-2.weight and 6 more"


def test_only_the_first_number_is_the_layer():
    assert listed(["h.0.experts.0.w", "h.1.experts.0.w", "h.0.experts.1.w"]) == "h.0-1.experts.0.w, h.0.experts.1.w"
