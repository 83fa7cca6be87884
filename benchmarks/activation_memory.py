"""Activations as `hf-lowprec estimate` counts them, against what a training step allocates on a CPU.

For each model, attention, dtype, with and without gradient checkpointing: the peak of one forward and backward, without
weights. Estimated on the meta device; measured by torch's profiler, from all that torch's CPU allocator hands out.
Dropout is 0, since its CPU kernels keep other tensors than those of GPUs. T5 is measured with eager attention only,
because torch has no fused CPU kernel for a position bias that needs a gradient.

    python benchmarks/activation_memory.py [--hidden 256] [--layers 4] [--batch 4] [--length 256] [--output FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_lowprec import cast_model, return_float32
from hf_lowprec.tools.estimate.activations import estimate_activations

WORDS = 8000


def configurations(hidden: int, layers: int) -> dict[str, tuple[str, Any]]:
    """Class and configuration of each model, without dropout."""
    heads = hidden // 64
    sizes = {"vocab_size": WORDS, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    tokens = {"bos_token_id": 1, "eos_token_id": 2}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    wide = {"intermediate_size": 3 * hidden}
    groups = {"num_key_value_heads": heads // 2}
    gpt2 = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "vocab_size": WORDS, **tokens}
    gpt2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    t5 = {"d_model": hidden, "d_kv": 64, "d_ff": 3 * hidden, "num_layers": layers, "num_heads": heads}
    t5 |= {"vocab_size": WORDS, "dropout_rate": 0.0, "decoder_start_token_id": 0}
    return {
        "Llama": ("LlamaForCausalLM", transformers.LlamaConfig(**sizes, **wide, **groups)),
        "Qwen3": ("Qwen3ForCausalLM", transformers.Qwen3Config(**sizes, **wide, **groups, head_dim=64)),
        "GPT-2": ("GPT2LMHeadModel", transformers.GPT2Config(**gpt2)),
        "BERT": ("BertForMaskedLM", transformers.BertConfig(**sizes, **wide, **no_dropout)),
        "T5": ("T5ForConditionalGeneration", transformers.T5Config(**t5)),
    }


def build(name: str, config: Any, attention: str, bf16: bool, device: str) -> Any:
    """A model in training mode, cast as Trainer does for our optimizers if `bf16`."""
    config._attn_implementation = attention
    config.use_cache = False
    with torch.device(device):
        model = getattr(transformers, name)(config).train()
    if bf16:
        cast_model(model)
        return_float32(model, next_to_loss=False)
    return model


def peak_allocation(function: Callable[[], object]) -> int:
    """The most bytes that `function` holds at once, beyond what was there before."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        function()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(held)


def measure(model: Any, batch: int, length: int, checkpointing: bool) -> int:
    """The peak of the second forward and backward of a model, whose gradients are new."""
    if checkpointing:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    tokens = torch.randint(5, WORDS, (batch, length))

    def forward_and_backward() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()

    forward_and_backward()
    model.zero_grad()
    return peak_allocation(forward_and_backward)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default in (("hidden", 256), ("layers", 4), ("batch", 4), ("length", 256)):
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--models", nargs="*", help="names of models; all by default")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    results = []
    for title, (name, config) in configurations(options.hidden, options.layers).items():
        if options.models and title not in options.models:
            continue
        for attention, bf16, checkpointing in itertools.product(("eager", "sdpa"), (False, True), (False, True)):
            if (title, attention) == ("T5", "sdpa"):
                continue
            case = (name, config, attention, bf16)
            estimated = estimate_activations(build(*case, "meta"), options.batch, options.length, checkpointing)
            measured = measure(build(*case, "cpu"), options.batch, options.length, checkpointing)
            error = estimated.with_gradients / measured - 1
            result = {"model": title, "attention": attention, "dtype": "BF16" if bf16 else "FP32"}
            result |= {"checkpointing": checkpointing, "estimated": estimated.with_gradients, "measured": measured}
            results.append(result | {"error": round(error, 4)})
            kind = f"{title:6} {attention:6} {result['dtype']} {'checkpointed' if checkpointing else '':12}"
            sizes = f"{estimated.with_gradients / 2**20:8.1f} MiB estimated {measured / 2**20:8.1f} MiB measured"
            print(kind, sizes, f"{error:+.1%}", flush=True)
    print(f"largest error: {max(abs(result['error']) for result in results):.1%}")
    if options.output is not None:
        setup = {name: getattr(options, name) for name in ("hidden", "layers", "batch", "length")}
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        data = {"sizes": {**setup, "vocabulary": WORDS}, "versions": versions, "results": results}
        options.output.write_text(json.dumps(data, indent=1) + "\n")
    return results


if __name__ == "__main__":
    main()
