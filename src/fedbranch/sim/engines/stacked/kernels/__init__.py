"""Triton kernels for stacks of models on an NVIDIA GPU."""
