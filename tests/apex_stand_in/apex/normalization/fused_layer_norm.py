"""The functions of apex/normalization/fused_layer_norm.py."""

import torch.nn.functional as F

calls = []


def fused_layer_norm_affine(input, weight, bias, normalized_shape, eps=1e-6, memory_efficient=False):
    calls.append("layer")
    return F.layer_norm(input, normalized_shape, weight, bias, eps)


def fused_rms_norm_affine(input, weight, normalized_shape, eps=1e-6, memory_efficient=False):
    calls.append("rms")
    return F.rms_norm(input, normalized_shape, weight, eps)
