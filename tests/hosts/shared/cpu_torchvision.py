"""Import before torchvision: its build for CUDA does not import beside torch for CPUs unless these operators exist."""

import torch

for operator in ("nms", "qnms"):
    torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
