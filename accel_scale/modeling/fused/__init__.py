"""Fused kernels of other packages that replace a model's own small layers."""
