"""Triton kernels for stacks of models on a GPU."""
