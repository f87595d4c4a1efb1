"""MLX's buffer cache as a model, and recordings replayed through it."""

from mlxmem.cache.policies import CpuPolicy, CudaPolicy, MetalPolicy, Policy

__all__ = ["CpuPolicy", "CudaPolicy", "MetalPolicy", "Policy"]
