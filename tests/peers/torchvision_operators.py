"""For programs in vLLM's Python, to import before vLLM: that imports torchvision, whose own operators are of another
build of torch than that without CUDA and do not load. Here they are declared."""

import torch

OPERATORS = torch.library.Library("torchvision", "DEF")
for each in ("nms", "qnms"):
    OPERATORS.define(f"{each}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
