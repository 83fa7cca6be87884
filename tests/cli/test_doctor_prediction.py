"""`hf-lowprec doctor MODEL`: what it prints and writes, its advice, its exit status."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import T5Config, T5ForConditionalGeneration

from hf_lowprec.integrations.checkpoint_files.stored_weights import open_weights
from hf_lowprec.tools.doctor.prediction import ModePrediction
from tests.support.command_output import hf_lowprec, refused
from tests.support.training.tiny_trainer import llama, trained

FINE_TUNING = ("--lr", 2e-5, "--steps", 1000)
PRETRAINING = ("--lr", 3e-4, "--steps", 1000, "--scheduler", "cosine", "--warmup-steps", 0.05)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    llama().save_pretrained(folder)
    return folder


def run(*words):
    return hf_lowprec("doctor", *words)


def numbers(*words) -> tuple[int, dict]:
    result = run(*words, "--json")
    assert result.exit_code in (0, 1), result.output
    return result.exit_code, json.loads(result.stdout)


def test_stock_bf16_at_a_small_learning_rate_goes_wrong(model):
    result = run(model, *FINE_TUNING, "--weight-decay", 0.1)
    assert result.exit_code == 1
    assert max(map(len, result.output.splitlines())) <= 80
    text = " ".join(result.output.split())
    assert "norms in all steps" in text
    assert "Weight decay is lost in rounding: in 100% of the steps" in text
    assert "The second moment does not decay" in text
    assert 'Use optim="adamw_bf16_split".' in text
    rows = {line.split()[0]: line.split() for line in result.output.splitlines() if line.strip()}
    assert rows["norms"][2:] == ["1.00", "1-1000", "FP32", "FP32", "FP32"]
    assert rows["all"][1] == f"{sum(param.numel() for param in llama().parameters()):,}"


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (["--optim", "adamw_bf16_kahan"], []),
        (
            ["--optim", "adamw_bf16_kahan", "--optim-args", "state_rounding=nearest"],
            ["second_moment_frozen"],
        ),
        (["--optim", "adamw_bf16_sr"], []),
        (["--optim", "adamw_bf16_sr", "--lr", 1e-7], ["too_much_noise"]),
        (["--optim", "adamw_bf16_sr", "--optim-args", "rounding=nearest"], ["updates_lost"]),
        (["--optim", "lion_bf16_kahan"], []),
        (["--optim", "adamw_torch_fused", "--beta2", 0.95], ["updates_lost"]),
    ],
)
def test_the_requested_optimizer_decides_the_exit_status(model, options, wrong):
    status, found = numbers(model, *FINE_TUNING, "--weight-decay", 0.1, *options)
    assert status == bool(wrong)
    assert [finding["code"] for finding in found["findings"]] == wrong


def test_advice_for_fine_tuning_pretraining_and_no_training_at_all(model):
    _, fine_tuning = numbers(model, *FINE_TUNING)
    assert (fine_tuning["advice"]["optim"], fine_tuning["advice"]["optim_args"]) == ("adamw_bf16_split", None)
    _, pretraining = numbers(
        model, *PRETRAINING, "--optim", "adamw_bf16_kahan", "--optim-args", "rounding=nearest,seed=3"
    )
    optim_args = pretraining["advice"]["optim_args"]
    assert pretraining["advice"]["optim"] == "adamw_bf16_sr" and optim_args.endswith("|split,seed=3")
    status, advised = numbers(model, *PRETRAINING, "--optim", "adamw_bf16_sr", "--optim-args", optim_args)
    assert (status, advised["findings"]) == (0, [])
    _, tiny = numbers(model, "--lr", 1e-10, "--steps", 1000)
    assert tiny["advice"]["optim"] is None and "even for FP32 weights" in tiny["advice"]["text"]


@pytest.mark.parametrize(("lr", "lost"), [(2e-5, "0.00"), (1e-9, None)])
def test_the_table_has_what_split_weights_lose(model, lr, lost):
    """Nothing at a usual learning rate, and at a tiny one the share that `--json` has. Five digits of steps fit."""
    words = (model, "--lr", lr, "--steps", 10000, "--optim", "adamw_bf16_split")
    result = run(*words)
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 80
    assert next(line for line in lines if "nearest" in line).split() == ["nearest", "stochastic", "kahan", "split"]
    assert "split: FP32 weights" in " ".join(lines)
    (mlp,) = (line.split() for line in lines if line.split()[:1] == ["mlp"])
    share = numbers(*words)[1]["kinds"]["mlp"]["split"]["lost_updates"]
    assert mlp[-1] == (lost or f"{share:.2f}")
    assert (share > 0.5) == (lost is None)


def test_options_of_another_library_are_not_recommended(model):
    _, found = numbers(model, *FINE_TUNING, "--optim-args", "foo=1")
    assert (found["advice"]["optim"], found["advice"]["optim_args"]) == ("adamw_bf16_split", None)


def test_a_schedule_of_rounding_is_predicted_phase_by_phase(model):
    options = ("--lr", 2e-5, "--steps", 100, "--scheduler", "constant", "--optim", "adamw_bf16_sr", "--optim-args")
    _, found = numbers(model, *options, "rounding=nearest:0.25|kahan")
    part = found["kinds"]["mlp"]
    assert part["requested"]["vanishing_steps"][-1][1] <= 25 < part["nearest"]["vanishing_steps"][-1][1]
    assert 0 < part["requested"]["lost_updates"] < part["nearest"]["lost_updates"]


@pytest.mark.parametrize(("number", "text"), [(-0.004, "0.00"), (-0.006, "-0.01")])
def test_zero_has_no_sign_in_the_table(model, monkeypatch, number, text):
    """Where updates move weights too far on average, the loss is below zero, and may be rounded to zero."""
    monkeypatch.setattr(ModePrediction, "lost_in_run", number)
    (line,) = (line for line in run(model, *FINE_TUNING).output.splitlines() if line.split()[:1] == ["mlp"])
    assert line.split()[2] == text


def test_norms_stay_in_fp32_only_with_our_optimizers(model):
    assert "requested" in numbers(model, *FINE_TUNING)[1]["kinds"]["norms"]
    assert [*numbers(model, *FINE_TUNING, "--optim", "adamw_bf16_sr")[1]["kinds"]["norms"]] == ["parameters"]


def test_what_a_cast_keeps_is_not_predicted(tmp_path, model):
    """T5 keeps `wo`, a part of its MLPs, in FP32; `keep_fp32` keeps more. Stock BF16 keeps nothing."""
    T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=4096, num_layers=1, num_heads=2)
    ).save_pretrained(tmp_path)
    run_, folder = ("--lr", 2e-4, "--steps", 100), tmp_path
    ours, stock = (
        numbers(folder, *run_, "--optim", name)[1]["kinds"]["mlp"] for name in ("adamw_bf16_sr", "adamw_torch")
    )
    weights = open_weights(folder)
    mlp = {name: weights.read(name) for name in weights.infos if "wi" in name or "wo" in name}
    without = {name: tensor for name, tensor in mlp.items() if "wo" not in name}
    for found, tensors in ((ours, without), (stock, mlp)):
        (tmp_path / "part").mkdir(exist_ok=True)
        save_file({f"mlp.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "part" / "model.safetensors")
        part = numbers(tmp_path / "part", *run_)[1]["kinds"]["mlp"]["nearest"]
        assert found["nearest"]["lost_updates"] == pytest.approx(part["lost_updates"])
    options = ("--optim", "adamw_bf16_sr", "--optim-args")
    assert [*numbers(model, *run_, *options, "keep_fp32=lm_head")[1]["kinds"]["head"]] == ["parameters"]
    assert "lm_haed" in refused("doctor", model, *run_, *options, "keep_fp32=lm_haed")
    assert "keep_fp32=wi needs the model" in refused("doctor", tmp_path / "part", *run_, *options, "keep_fp32=wi")


def test_tensors_of_large_weights_lose_more(tmp_path):
    """Each doubling of the weights doubles the spacing; and integers are not weights."""
    weights = {f"model.layers.0.mlp.{k}.weight": torch.full((8, 8), 0.3 * 2**k) for k in range(2)}
    weights |= {"lm_head.weight": torch.full((8, 8), 0.3), "positions": torch.arange(8)}
    save_file(weights, tmp_path / "model.safetensors")
    kinds = numbers(tmp_path, "--lr", 1e-3, "--steps", 200)[1]["kinds"]
    assert kinds["mlp"]["nearest"]["lost_updates"] > kinds["head"]["nearest"]["lost_updates"]
    assert kinds["mlp"]["nearest"]["first_vanishing_step"] < kinds["head"]["nearest"]["first_vanishing_step"]
    assert kinds["all"]["parameters"] == 3 * 64


@pytest.mark.parametrize("optim", ["adamw_bf16_sr", "adamw_torch"])
def test_a_checkpoint_is_read_with_its_moments(tmp_path, optim):
    """Ours has the names of its parameters; of a stock checkpoint, the moments of all of them are taken together."""
    trained(tmp_path, optim=optim, max_steps=4, save_strategy="steps", save_steps=4)
    _, found = numbers(tmp_path / "checkpoint-4", *FINE_TUNING, "--optim", "adamw_torch")
    assert found["sizes_of_updates"] == "checkpoint"
    lost = {kind: part["nearest"]["lost_updates"] for kind, part in found["kinds"].items()}
    _, noise = numbers(tmp_path / "checkpoint-4", *FINE_TUNING, "--optim", "lion_bf16_sr")
    assert noise["sizes_of_updates"] == "noise"  # Lion's directions are signs, whatever the moments
    assert 0 < lost["all"] < 1


@pytest.mark.parametrize(
    ("settings", "words", "expected"),
    [
        (
            {"optim": "adamw_bf16_split", "optim_args": "state_dtype=exp_avg:int8|exp_avg_sq:float32"},
            [],
            "optim='adamw_bf16_split', optim_args='state_dtype=exp_avg:int8|exp_avg_sq:float32': no problem found.",
        ),
        ({"optim": "adam_bf16_sr"}, [], "optim='adam_bf16_sr': no problem found."),
        ({"optim": "adamw_bf16_sr", "save_only_model": True}, [], "optim='adamw_torch': - Weight updates are"),
        ({"optim": "adamw_torch_fused"}, [], "optim='adamw_torch_fused': - Weight updates are"),
        (
            {"optim": "adamw_bf16_kahan", "optim_args": "rounding=nearest,state_rounding=nearest,betas=0.9|0.98"},
            ["--optim-args", "state_rounding=stochastic"],
            "optim='adamw_bf16_split', optim_args='rounding=nearest,state_rounding=stochastic': - Weight",
        ),
        (
            {"optim": "adamw_bf16_kahan", "optim_args": "state_rounding=nearest", "adam_beta2": 0.9995},
            [],
            "kahan', optim_args='state_rounding=nearest': - The second moment does not decay, so steps stay too "
            "short after large gradients: BF16 numbers rounded to nearest stay the same if they lose a share of "
            "1 - beta2 = 0.0005,",
        ),
        ({"optim": "adamw_bf16_split"}, ["--optim", "adamw_torch"], "optim='adamw_torch': - Weight updates are"),
    ],
)
def test_the_optimizer_is_that_of_the_checkpoint(tmp_path, settings, words, expected):
    trained(tmp_path, **settings, max_steps=1, save_strategy="steps", save_steps=1)
    result = run(tmp_path / "checkpoint-1", "--lr", 2e-5, "--steps", 1000, *words)
    assert expected in " ".join(result.output.split())
    assert result.exit_code == ("no problem" not in expected)


def test_the_plot_is_a_png(tmp_path, model):
    result = run(model, *PRETRAINING, "--plot", tmp_path / "lost.png")
    assert result.exit_code == 1, result.output
    assert (tmp_path / "lost.png").read_bytes()[:4] == b"\x89PNG"
    assert "lost.xyz' cannot be written: Format 'xyz'" in refused(
        "doctor", model, *PRETRAINING, "--plot", tmp_path / "lost.xyz"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["MODEL", "--steps", 10], "with MODEL, --lr must be given"),
        (["MODEL", "--lr", 1e-3], "with MODEL, --steps must be given"),
        (["--lr", 1e-3], "it is for predictions, which need a MODEL"),
        (["--json"], "it is for predictions, which need a MODEL"),
        (["./nothing", *FINE_TUNING], "MODEL: there is no file or folder './nothing'"),
        (["nobody/nothing", *FINE_TUNING], "there is no folder 'nobody/nothing'"),
        (["MODEL", *FINE_TUNING, "--optim", "sgd_bf16_sr"], "the sizes of its updates are not predicted"),
        (["MODEL", *FINE_TUNING, "--scheduler-kwargs", "{"], "--scheduler-kwargs"),
    ],
)
def test_misuse_is_told_in_a_line(model, words, message):
    assert message in refused("doctor", *(model if word == "MODEL" else word for word in words))


def test_a_folder_without_weights(tmp_path):
    assert "has no weights that can be read" in refused("doctor", tmp_path, *FINE_TUNING)
    save_file({"lm_head.weight": torch.zeros(2, 2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    assert "no floating-point weights" in refused("doctor", tmp_path, *FINE_TUNING)
