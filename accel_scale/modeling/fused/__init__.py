"""Fused kernels of other packages in place of a model's own small layers."""
