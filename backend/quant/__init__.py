"""Number formats of weights and caches: their formulas, packing and reference products, in plain torch.

`affine` is the form behind them all; `w8` and `w4` make it from float weights; `blocks` lays it out in memory.
`weights.quantize_weight(weight, to, group_size, importance)` turns one float32 matrix into a
`backend.cpu.packed.PackedWeight` of the format "w8" or "w4", and `weights.is_quantized(name)` says which tensors of a
model that is done to. `PackedWeight.dequantize()` gives the float32 matrix that products then equal. W8A8 is "w8" with
inputs rounded to bytes as `backend.cpu.activations` does it.
"""
