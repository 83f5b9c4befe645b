"""Convolution and pooling of many models at once, for NVIDIA GPUs, in Triton.

vmap turns a convolution with own weights for each model into a grouped convolution. cuDNN has
no fast kernels for it, and vmap moves the data around pooling. Here a convolution is one
batched matrix product over image patches. Its result has the memory order that the next layer
needs: for each model channels, then images, rows and columns. Every number is written by one
thread, so results repeat to the bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["Window", "stacked_conv2d", "stacked_max_pool2d"]

# Numbers per program, by measurement on an H200.
BLOCK = 2048
POOL_BLOCK = 256
UNPOOL_BLOCK = 1024


class Window(NamedTuple):
    """How a convolution's window moves over an image; each field is (rows, columns)."""

    size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def num_places(self, height: int, width: int) -> tuple[int, int]:
        """Count the places of the window in an image: (down, right)."""
        down, right = (
            (extent + 2 * self.padding[i] - self.dilation[i] * (self.size[i] - 1) - 1)
            // self.stride[i]
            + 1
            for i, extent in enumerate((height, width))
        )
        return down, right


def stacked_conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> Tensor:
    """Convolve every model's images with its own weights.

    Parameters
    ----------
    x
        Shape (num_models, num_images, channels, height, width), in any memory order.
    weight, bias
        Shape (num_models, out_channels, channels, rows, columns), (num_models, out_channels).
    window
        How the window moves.
    """
    result: Tensor = _Convolution.apply(x, weight, bias, window)  # type: ignore[no-untyped-call]  # torch's annotation is missing
    return result


def stacked_max_pool2d(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Take the largest of every window of pixels, for windows that do not overlap.

    Parameters
    ----------
    x
        Shape (num_models, num_images, channels, height, width), in any memory order.
    size
        Rows and columns of a window. Pixels at the edges that fill no window are ignored.
    """
    result: Tensor = _MaxPool.apply(x, size)  # type: ignore[no-untyped-call]  # torch's annotation is missing
    return result


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> Tensor:
        num_models, num_images, channels, height, width = x.shape
        out_channels = weight.shape[1]
        down, right = window.num_places(height, width)
        num_weights = channels * window.size[0] * window.size[1]
        # One more row, of ones, for the bias. Tensor cores need multiples of 16 bytes.
        depth = triton.cdiv(num_weights + 1, 16 // x.element_size()) * (16 // x.element_size())
        num_places = num_images * down * right
        patches = x.new_empty(num_models, depth, num_places)
        grid = (triton.cdiv(num_places, BLOCK), depth, num_models)
        _gather_patches[grid](
            x, patches, *x.stride(), num_places, depth, channels, height, width, down, right,
            *window.size, *window.stride, *window.padding, *window.dilation, BLOCK,
        )  # fmt: skip
        matrix = weight.new_zeros(num_models, out_channels, depth)
        matrix[:, :, :num_weights] = weight.reshape(num_models, out_channels, -1)
        if bias is not None:
            matrix[:, :, num_weights] = bias
        product = torch.bmm(matrix, patches)
        ctx.save_for_backward(patches, matrix)
        ctx.window, ctx.has_bias = window, bias is not None
        ctx.x_like, ctx.weight_shape = (x.shape, x.stride()), weight.shape
        shape = (num_models, out_channels, num_images, down, right)
        return product.view(shape).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        patches, matrix = ctx.saved_tensors
        (gradient,) = gradients
        num_models, num_images, out_channels, down, right = gradient.shape
        flat = gradient.transpose(1, 2).reshape(num_models, out_channels, -1)
        shape, strides = ctx.x_like
        num_weights = ctx.weight_shape[2:].numel()
        x_gradient = weight_gradient = bias_gradient = None
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            by_matrix = _sum_over_places(flat, patches)
            weight_gradient = by_matrix[:, :, :num_weights].reshape(ctx.weight_shape)
            bias_gradient = by_matrix[:, :, num_weights] if ctx.has_bias else None
        if ctx.needs_input_grad[0]:
            by_patch = torch.bmm(matrix.mT, flat)
            x_gradient = torch.empty_strided(
                shape, strides, dtype=gradient.dtype, device=gradient.device
            )
            _, _, channels, height, width = shape
            num_pixels = num_images * height * width
            grid = (triton.cdiv(num_pixels, BLOCK), channels, num_models)
            _scatter_patches[grid](
                by_patch, x_gradient, *strides, num_pixels, num_images * down * right,
                matrix.shape[2], height, width, down, right,
                *ctx.window.size, *ctx.window.stride, *ctx.window.padding, *ctx.window.dilation,
                BLOCK,
            )  # fmt: skip
        return x_gradient, weight_gradient, bias_gradient, None


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: tuple[int, int]) -> Tensor:
        planes, order = _planes(x)
        height, width = x.shape[3:]
        down, right = height // size[0], width // size[1]
        shape = (*(x.shape[i] for i in order[:3]), down, right)
        largest = x.new_empty(shape)
        where = torch.empty(shape, dtype=torch.uint8, device=x.device)
        grid = (triton.cdiv(largest.numel(), POOL_BLOCK),)
        _pool[grid](
            planes, largest, where, largest.numel(), height, width, down, right, *size, POOL_BLOCK
        )
        ctx.save_for_backward(where)
        ctx.size, ctx.order, ctx.x_shape = size, order, x.shape
        return largest.permute(order)  # swapping two dimensions is its own inverse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        (where,) = ctx.saved_tensors
        (gradient,) = gradients
        flat = gradient.permute(ctx.order).contiguous()
        shape = [ctx.x_shape[i] for i in ctx.order]
        height, width = shape[3:]
        x_gradient = gradient.new_empty(shape)
        grid = (triton.cdiv(x_gradient.numel(), UNPOOL_BLOCK),)
        _unpool[grid](
            flat, where, x_gradient, x_gradient.numel(), height, width, *flat.shape[3:],
            *ctx.size, UNPOOL_BLOCK,
        )  # fmt: skip
        return x_gradient.permute(ctx.order), None


def _sum_over_places(gradient: Tensor, patches: Tensor) -> Tensor:
    """Multiply (num_models, out_channels, places) with patches transposed.

    The result is small and the sum long, and cuBLAS has no good kernel for that. So the sum is
    cut into parts, which are added at the end, always in the same order.
    """
    num_models, out_channels, num_places = gradient.shape
    depth = patches.shape[1]
    tile_out = min(64, max(16, triton.next_power_of_2(out_channels)))
    tile_depth = min(64, max(16, triton.next_power_of_2(depth)))
    num_tiles = triton.cdiv(out_channels, tile_out) * triton.cdiv(depth, tile_depth)
    num_parts = max(1, min(32, 2048 // (num_models * num_tiles), num_places // 1024))
    places_per_part = triton.cdiv(triton.cdiv(num_places, num_parts), 64) * 64
    parts = gradient.new_empty(num_parts, num_models, out_channels, depth, dtype=torch.float32)
    _weight_gradient[(num_parts, num_tiles, num_models)](
        gradient, patches, parts, num_places, depth, out_channels, places_per_part,
        tile_out, tile_depth, 64, "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
    )  # fmt: skip
    return parts.sum(dim=0).to(gradient.dtype)


def _planes(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return images as contiguous planes, and the order of dimensions that makes them so."""
    order = (0, 2, 1, 3, 4)  # the order of a convolution's result
    if x.permute(order).is_contiguous():
        return x.permute(order), order
    return x.contiguous(), (0, 1, 2, 3, 4)


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no type information
def _gather_patches(  # type: ignore[no-untyped-def]  # Triton's own language
    x, patches, stride_n, stride_b, stride_c, stride_h, stride_w, num_places, depth,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    DOWN: tl.constexpr, RIGHT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP_H: tl.constexpr, STEP_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, GAP_H: tl.constexpr, GAP_W: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1).to(tl.int64)
    n = tl.program_id(2).to(tl.int64)
    inside = place < num_places
    image = place // (DOWN * RIGHT)
    rest = place % (DOWN * RIGHT)
    channel = k // (ROWS * COLUMNS)
    h = (rest // RIGHT) * STEP_H - PAD_H + (k // COLUMNS) % ROWS * GAP_H
    w = (rest % RIGHT) * STEP_W - PAD_W + k % COLUMNS * GAP_W
    is_pixel = (h >= 0) & (h < HEIGHT) & (w >= 0) & (w < WIDTH) & (channel < CHANNELS)
    source = n * stride_n + image.to(tl.int64) * stride_b + channel * stride_c
    value = tl.load(x + source + h * stride_h + w * stride_w, mask=inside & is_pixel, other=0.0)
    is_bias = k == CHANNELS * ROWS * COLUMNS
    value = tl.where(is_bias, tl.full((BLOCK,), 1.0, value.dtype), value)
    target = (n * depth + k) * num_places + place
    tl.store(patches + target, value, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no type information
def _scatter_patches(  # type: ignore[no-untyped-def]  # Triton's own language
    patches, x, stride_n, stride_b, stride_c, stride_h, stride_w, num_pixels, num_places, depth,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DOWN: tl.constexpr, RIGHT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP_H: tl.constexpr, STEP_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, GAP_H: tl.constexpr, GAP_W: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.program_id(1).to(tl.int64)
    n = tl.program_id(2).to(tl.int64)
    inside = pixel < num_pixels
    image = pixel // (HEIGHT * WIDTH)
    h = pixel % (HEIGHT * WIDTH) // WIDTH
    w = pixel % WIDTH
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in tl.static_range(ROWS):
        for j in tl.static_range(COLUMNS):
            from_h = h + PAD_H - i * GAP_H
            from_w = w + PAD_W - j * GAP_W
            row = from_h // STEP_H
            column = from_w // STEP_W
            is_place = (from_h >= 0) & (from_h % STEP_H == 0) & (row < DOWN)
            is_place = is_place & (from_w >= 0) & (from_w % STEP_W == 0) & (column < RIGHT)
            k = (channel * ROWS + i) * COLUMNS + j
            place = image * (DOWN * RIGHT) + row * RIGHT + column
            source = (n * depth + k) * num_places + place
            part = tl.load(patches + source, mask=inside & is_place, other=0.0)
            total += part.to(tl.float32)
    target = n * stride_n + image.to(tl.int64) * stride_b + channel * stride_c
    target = target + h * stride_h + w * stride_w
    tl.store(x + target, total.to(x.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no type information
def _pool(  # type: ignore[no-untyped-def]  # Triton's own language
    x, largest, where, num_results,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DOWN: tl.constexpr, RIGHT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    result = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = result < num_results
    plane = (result // (DOWN * RIGHT)).to(tl.int64)
    h = result % (DOWN * RIGHT) // RIGHT * ROWS
    w = result % RIGHT * COLUMNS
    source = x + plane * (HEIGHT * WIDTH) + h * WIDTH + w
    best = tl.load(source, mask=inside, other=0.0)
    place = tl.zeros((BLOCK,), dtype=tl.int32)
    for i in tl.static_range(ROWS):
        for j in tl.static_range(COLUMNS):
            value = tl.load(source + i * WIDTH + j, mask=inside, other=0.0)
            is_better = (value > best) | (value != value)
            best = tl.where(is_better, value, best)
            place = tl.where(is_better, i * COLUMNS + j, place)
    tl.store(largest + result, best, mask=inside)
    tl.store(where + result, place.to(tl.uint8), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no type information
def _unpool(  # type: ignore[no-untyped-def]  # Triton's own language
    gradient, where, x, num_pixels,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DOWN: tl.constexpr, RIGHT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pixel < num_pixels
    plane = (pixel // (HEIGHT * WIDTH)).to(tl.int64)
    h = pixel % (HEIGHT * WIDTH) // WIDTH
    w = pixel % WIDTH
    row = h // ROWS
    column = w // COLUMNS
    is_pooled = inside & (row < DOWN) & (column < RIGHT)
    source = plane * (DOWN * RIGHT) + row * RIGHT + column
    place = tl.load(where + source, mask=is_pooled, other=255).to(tl.int32)
    value = tl.load(gradient + source, mask=is_pooled, other=0.0)
    is_largest = place == h % ROWS * COLUMNS + w % COLUMNS
    tl.store(x + pixel, tl.where(is_largest, value, tl.zeros_like(value)), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no type information
def _weight_gradient(  # type: ignore[no-untyped-def]  # Triton's own language
    gradient, patches, parts, num_places, depth, out_channels, PLACES_PER_PART: tl.constexpr,
    TILE_OUT: tl.constexpr, TILE_DEPTH: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    n = tl.program_id(2).to(tl.int64)
    num_tiles = tl.cdiv(depth, TILE_DEPTH)
    out = tl.program_id(1) // num_tiles * TILE_OUT + tl.arange(0, TILE_OUT)
    deep = tl.program_id(1) % num_tiles * TILE_DEPTH + tl.arange(0, TILE_DEPTH)
    total = tl.zeros((TILE_OUT, TILE_DEPTH), dtype=tl.float32)
    last = tl.minimum((part + 1) * PLACES_PER_PART, num_places)
    for start in range(0, PLACES_PER_PART, TILE):
        place = part * PLACES_PER_PART + start + tl.arange(0, TILE)
        left = tl.load(
            gradient + (n * out_channels + out[:, None]) * num_places + place[None, :],
            mask=(out[:, None] < out_channels) & (place[None, :] < last),
            other=0.0,
        )
        right = tl.load(
            patches + (n * depth + deep[:, None]) * num_places + place[None, :],
            mask=(deep[:, None] < depth) & (place[None, :] < last),
            other=0.0,
        )
        total = tl.dot(left, tl.trans(right), total, input_precision=PRECISION)
    row = (part * tl.num_programs(2) + n) * out_channels + out[:, None]
    is_entry = (out[:, None] < out_channels) & (deep[None, :] < depth)
    tl.store(parts + row * depth + deep[None, :], total, mask=is_entry)
