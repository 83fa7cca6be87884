"""A batch for any model of transformers, from the names in the signature of its `forward`.

`offers` yields batches in the order in which they are worth trying: with labels first, with every modality first. The
caller takes the first on which the FP32 model trains.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.every_architecture.batch_exceptions import BATCHES
from tests.support.every_architecture.tiny_configs import IMAGE
from tests.support.every_architecture.tiny_labels import LENGTH, ROWS, Batch, asks_labels, find, labels_of, tokens_of

SAMPLES, FRAMES = 1600, 64
MODALITIES = {"pixel_values", "input_features", "input_values"}


def offers(model: nn.Module) -> Iterator[tuple[str, Batch]]:
    """Batches worth trying, each with what it lacks (`""`: labels and every modality)."""
    names = set(inspect.signature(model.forward).parameters)
    config: Any = model.config
    torch.manual_seed(1)
    given = BATCHES.get(type(model).__name__) or BATCHES.get(config.model_type)
    if given is not None:
        batch = given(config, type(model).__name__)
        alone = bool(names & MODALITIES) and not batch.keys() & MODALITIES
        yield "text alone" * alone, batch
        words = ["text alone"] * alone + ["without labels"]
        yield ", ".join(words), {k: v for k, v in batch.items() if "label" not in k}
        return
    seen: list[Batch] = []
    for note, parts in _inputs(model, config, names):
        for labels in (labels_of(model, config, names, parts), {}):
            for more in ({}, _decoder(config, names)):
                batch = {**parts, **labels, **more}
                if not any(batch.keys() == old.keys() and _same(batch, old) for old in seen):
                    seen.append(batch)
                    words = [note] * bool(note) + ["without labels"] * (not labels and bool(asks_labels(names)))
                    yield ", ".join(words), batch


def _same(one: Batch, two: Batch) -> bool:
    shape = {k: getattr(v, "shape", None) for k, v in one.items()}
    return shape == {k: getattr(v, "shape", None) for k, v in two.items()}


def _inputs(model: nn.Module, config: Any, names: set[str]) -> Iterator[tuple[str, Batch]]:
    vision, speech = _vision(model, config, names), list(_speech(model, config, names))
    if "input_ids" in names:
        text = _text(config, names, model)
        for images in vision:
            yield "", _with_images(model, config, names, text, images)
            yield "", {**text, **images}
        for sound in speech:
            yield "", _with_sound(model, config, names, text, sound)
            yield "", {**text, **sound}
        yield "text alone" if vision or speech else "", text
    else:
        for images in vision:
            yield "", images
        for sound in speech:
            yield "", sound


def _text(config: Any, names: set[str], model: nn.Module) -> Batch:
    tokens = tokens_of(config)
    mask = torch.ones_like(tokens)
    mask[1, -3:] = 0
    if "SequenceClassification" in type(model).__name__ and (end := find(config, "eos_token_id")) is not None:
        tokens[:, LENGTH - 4] = end  # where BART looks
    text: Batch = {"input_ids": tokens}
    if "attention_mask" in names:
        text["attention_mask"] = mask
    for name in names & {"qformer_input_ids", "task_inputs"}:
        text[name] = tokens
    if "bbox" in names:
        corner = torch.randint(0, 40, (ROWS, LENGTH, 2))
        text["bbox"] = torch.cat((corner, corner + torch.randint(1, 20, (ROWS, LENGTH, 2))), -1)
    if "MultipleChoice" in type(model).__name__:
        text = {name: value[:, None].expand(ROWS, 2, *value.shape[1:]).contiguous() for name, value in text.items()}
    return text


def _vision(model: nn.Module, config: Any, names: set[str]) -> list[Batch]:
    """Pixels as the signature asks for them: images, videos, or rows of patches with the grid they come from."""
    found: list[Batch] = []
    channels = find(config, "num_channels", "in_channels", "in_chans", default=3)
    size = find(config, "image_size", "img_size", "input_size", default=IMAGE, kind=(int, list, tuple))
    height, width = (size, size) if isinstance(size, int) else (size[-2], size[-1])
    patch = find(config, "patch_size", default=8)
    if "pixel_values" in names and names & {"image_grid_thw", "grid_thw"}:
        deep = find(config, "temporal_patch_size", "patch_temporal", default=1)
        for depth in (deep, 1):
            rows = torch.randn(ROWS * 16, channels * depth * patch * patch)
            grid = "image_grid_thw" if "image_grid_thw" in names else "grid_thw"
            found.append({"pixel_values": rows, grid: torch.tensor([[1, 4, 4]] * ROWS)})
    elif {"hidden_states", "grid_thw"} <= names:
        deep = find(config, "temporal_patch_size", "patch_temporal", default=1)
        for depth in (deep, 1):
            rows = torch.randn(ROWS * 16, channels * depth * patch * patch)
            found.append({"hidden_states": rows, "grid_thw": torch.tensor([[1, 4, 4]] * ROWS)})
    if {"pixel_values", "spatial_shapes", "pixel_attention_mask"} <= names:
        rows, mask = torch.randn(ROWS, 16, channels * patch * patch), torch.ones(ROWS, 16, dtype=torch.long)
        shapes = torch.tensor([[4, 4]] * ROWS)
        found.append({"pixel_values": rows, "pixel_attention_mask": mask, "spatial_shapes": shapes})
    if "pixel_values" in names:
        found.append({"pixel_values": torch.randn(ROWS, channels, height, width)})
        if "image_sizes" in names:
            sizes = torch.tensor([[height, width]] * ROWS)
            found.append({**found[-1], "image_sizes": sizes})
            found.append({"pixel_values": torch.randn(ROWS, 2, channels, height, width), "image_sizes": sizes})
        frames = find(config, "num_frames", "frames_per_clip", default=2)
        found.append({"pixel_values": torch.randn(ROWS, frames, channels, height, width)})
        found.append({"pixel_values": torch.randn(ROWS, 1, channels, height, width)})
    elif "pixel_values_videos" in names:
        frames = find(config, "num_frames", "frames_per_clip", default=2)
        found.append({"pixel_values_videos": torch.randn(ROWS, frames, channels, height, width)})
    for images in found:
        if "pixel_mask" in names and "grid_thw" not in str(images.keys()):
            images["pixel_mask"] = torch.ones(ROWS, height, width, dtype=torch.long)
        if "merge_sizes" in names:
            images["merge_sizes"] = torch.ones(ROWS, dtype=torch.long)
        if "bool_masked_pos" in names and "MaskedImage" in type(model).__name__:
            images["bool_masked_pos"] = torch.arange((height // patch) * (width // patch)).expand(ROWS, -1) % 2 == 0
    return found


def _speech(model: nn.Module, config: Any, names: set[str]) -> Iterator[Batch]:
    mel = find(config, "num_mel_bins", "n_mels", "feature_size", "num_mel_channels", "input_dim", default=80)
    if "input_features" in names:
        mask = {"input_features_mask": torch.ones(ROWS, FRAMES, dtype=torch.long)}
        mask = mask if "input_features_mask" in names else {}
        whisper = find(config, "max_source_positions", default=FRAMES // 2) * 2
        wide = find(config, "feature_projection_input_dim", default=2 * mel)
        shapes = (
            (ROWS, mel, whisper),
            (ROWS, FRAMES, mel),
            (ROWS, mel, FRAMES),
            (ROWS, FRAMES, wide),
            (ROWS, 1, FRAMES, mel),
        )
        for shape in shapes:
            features = torch.randn(shape)
            if "feature_attention_mask" in names:
                yield {"input_features": features, "feature_attention_mask": torch.ones(ROWS, max(shape)).long()}
            yield {"input_features": features, **mask}
            if "attention_mask" in names and "input_ids" not in names:
                yield {"input_features": features, **mask, "attention_mask": torch.ones(ROWS, max(shape)).long()}
    if "input_values" in names:
        samples = 4 * SAMPLES if "XVector" in type(model).__name__ else SAMPLES  # frames for more convolutions
        yield {"input_values": torch.randn(ROWS, samples)}
        yield {"input_values": torch.randn(ROWS, 1, SAMPLES)}
        frames = find(config, "max_length", default=FRAMES)
        yield {"input_values": torch.randn(ROWS, frames, mel)}
        yield {"input_values": torch.randn(ROWS, mel, frames)}


def _placeholders(model: nn.Module, method: str, inputs: Batch) -> int:
    """How many rows of features an input becomes, as the model's own method computes them; 0 if it has none."""
    compute = next((getattr(part, method) for part in model.modules() if hasattr(part, method)), None)
    if compute is None:
        return 0
    asked = inspect.signature(compute).parameters
    try:
        with torch.no_grad():
            features = compute(**{k: v for k, v in inputs.items() if k in asked})
    except Exception:
        return 0
    for name in ("pooler_output", "last_hidden_state"):
        if getattr(features, name, None) is not None:
            features = getattr(features, name)
    if isinstance(features, tuple | list):
        tensors = [f for f in features if isinstance(f, Tensor)]
        # One tensor per image, or one for all of them beside other results.
        features = tensors if tensors and all(t.dim() == 2 for t in tensors) else tensors[:1]
    else:
        features = [features]
    return sum(f.numel() // f.shape[-1] for f in features)


def _with_rows(config: Any, names: set[str], text: Batch, token: int | None, count: int, more: Batch) -> Batch:
    if token is None or count == 0 or count % ROWS or text["input_ids"].dim() != 2:
        return {**text, **more}
    head = torch.full((ROWS, count // ROWS), token)
    tokens = torch.cat((head, text["input_ids"]), 1)
    batch = {**text, "input_ids": tokens, **more}
    if "attention_mask" in names:
        batch["attention_mask"] = torch.ones_like(tokens)
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in names:
            batch[name] = (tokens == token).long()
    return batch


def _with_images(model: nn.Module, config: Any, names: set[str], text: Batch, images: Batch) -> Batch:
    token = find(config, "image_token_id", "image_token_index")
    return _with_rows(config, names, text, token, _placeholders(model, "get_image_features", images), images)


def _with_sound(model: nn.Module, config: Any, names: set[str], text: Batch, sound: Batch) -> Batch:
    token = find(config, "audio_token_id", "audio_token_index")
    return _with_rows(config, names, text, token, _placeholders(model, "get_audio_features", sound), sound)


def _decoder(config: Any, names: set[str]) -> Batch:
    return {"decoder_input_ids": tokens_of(config)} if "decoder_input_ids" in names else {}
