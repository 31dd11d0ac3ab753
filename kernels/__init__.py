"""Quantisation: one file per operation, Triton kernel and torch reference side by side (dispatch.py picks).

quantize, dequantize, dequantize_accumulate, dequantize_sum_quantize, reorder_quantize; format.py is the message's
layout, noise.py the draws of stochastic rounding, bound.py the error bound. On a CPU (one core at 2.6 GHz, AVX-512,
1M elements, fp32), ns per element to encode, decode, decode-accumulate: 8 bits 0.95, 0.22, 0.30; 4 bits 1.1, 0.57,
0.62; stochastic encoding 2.1 and 2.4; with a clip searched among 8 scales 15.
"""
