"""The phases of a rounding schedule; `checkpoints/test_optimizer_state.py` trains and resumes with them."""

import pytest

from hf_lowprec.integrations.transformers.optim_args import optim_args_of
from hf_lowprec.integrations.transformers.rounding_schedule import RoundingSchedule
from tests.support.training.tiny_trainer import arguments, optimizer_of, trained


@pytest.mark.parametrize(
    ("text", "max_steps", "expected"),
    [
        ("kahan", 3, "kkk"),
        ("stochastic:0.8|kahan", 10, "sssssssskk"),
        ("stochastic:0.5|kahan", 5, "sskkk"),
        ("nearest:0.25|stochastic:0.5|kahan", 8, "nnsssskk"),
        ("stochastic:0.1|kahan", 3, "kkk"),  # the share rounds to no step
        ("stochastic:0.999|kahan", 3, "sss"),
    ],
)
def test_phases(text, max_steps, expected):
    schedule = RoundingSchedule.parse(text)
    assert "".join(schedule.mode(step, max_steps)[0] for step in range(max_steps)) == expected


def test_spaces_do_not_matter():
    assert RoundingSchedule.parse(" stochastic : 0.8 | kahan ") == RoundingSchedule.parse("stochastic:0.8|kahan")


def test_modes_have_their_short_names(tmp_path):
    assert RoundingSchedule.parse("sr:0.8|kahan") == RoundingSchedule.parse("stochastic:0.8|kahan")
    options = optim_args_of(arguments(tmp_path, optim="adamw_bf16_kahan", optim_args="rounding=sr"))
    assert options.optimizer["rounding"] == "stochastic"


def test_a_single_mode_is_no_schedule(tmp_path):
    options = optim_args_of(arguments(tmp_path, optim="adamw_bf16_sr", optim_args="rounding=kahan"))
    assert (options.optimizer["rounding"], options.rounding_schedule) == ("kahan", None)


def test_the_optimizer_begins_in_the_first_mode_and_the_report_says_the_others(tmp_path, capsys):
    words = "rounding=stochastic:0.5|kahan"
    trainer = trained(tmp_path, optim="adamw_bf16_kahan", optim_args=words, max_steps=4, save_strategy="no")
    printed = capsys.readouterr().out
    assert "rounding        weights stochastic" in printed
    assert "rounding modes: stochastic to step 2, then kahan" in printed
    optimizer = optimizer_of(trainer)
    assert {group["rounding"] for group in optimizer.param_groups} == {"kahan"}
    assert "compensation" in optimizer.state[trainer.model.lm_head.weight]
