"""Head norms, rotary embedding and the write into the cache, for CUDA: one pass over q, k, v."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _prepare_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    query_norm_ptr,
    key_norm_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_ptr,
    eps,
    OFFSET: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.arange(0, DIM_PADDED)
    mask = dims < HEAD_DIM
    row = qkv_ptr + (token * (HEADS + 2 * KV_HEADS) + head) * HEAD_DIM
    x = tl.load(row + dims, mask=mask, other=0.0)
    dtype = x.dtype
    is_query = head < HEADS
    is_value = head >= HEADS + KV_HEADS
    if not is_value:
        # The partner of dimension i in its pair is i + HALF, or i - HALF.
        partner_dims = tl.where(dims < HALF, dims + HALF, dims - HALF)
        rotated = dims < 2 * HALF
        partner = tl.load(row + partner_dims, mask=mask & rotated, other=0.0)
        if HAS_NORM:
            norm_ptr = tl.where(is_query, query_norm_ptr, key_norm_ptr)
            wide = x.to(tl.float32)
            factor = tl.rsqrt(tl.sum(wide * wide, 0) / HEAD_DIM + eps)
            weight = tl.load(norm_ptr + dims, mask=mask, other=0.0)
            partner_weight = tl.load(norm_ptr + partner_dims, mask=mask & rotated, other=0.0)
            partner_wide = partner.to(tl.float32) * factor
            if OFFSET != 0.0:
                x = (wide * factor * (OFFSET + weight.to(tl.float32))).to(dtype)
                partner = (partner_wide * (OFFSET + partner_weight.to(tl.float32))).to(dtype)
            else:
                x = weight * (wide * factor).to(dtype)
                partner = partner_weight * partner_wide.to(dtype)
        if HALF > 0:
            angle = tl.where(dims < HALF, dims, dims - HALF)
            cos = tl.load(cos_ptr + token * HALF + angle, mask=rotated, other=1.0)
            sin = tl.load(sin_ptr + token * HALF + angle, mask=rotated, other=0.0)
            sign = tl.where(dims < HALF, -1.0, 1.0)
            turned = x.to(tl.float32) * cos.to(tl.float32) + sign * partner.to(tl.float32) * sin.to(
                tl.float32
            )
            x = tl.where(rotated, turned.to(dtype), x)
    # Programs of one token touch disjoint heads, so writing in place is safe.
    if is_query:
        tl.store(row + dims, x, mask=mask)
    else:
        slot = tl.load(slot_ptr + token)
        kv_head = tl.where(is_value, head - HEADS - KV_HEADS, head - HEADS)
        place = ((slot // PAGE * KV_HEADS + kv_head) * PAGE + slot % PAGE) * HEAD_DIM
        if is_value:
            tl.store(value_cache_ptr + place + dims, x, mask=mask)
        else:
            tl.store(key_cache_ptr + place + dims, x, mask=mask)


def prepare_attention(
    qkv: torch.Tensor,
    num_heads: int,
    rotary: tuple[torch.Tensor, torch.Tensor] | None,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    offset: float,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Normalise and rotate q and k, write k and v to their slots, and return q.

    Args:
        qkv: [tokens, heads + 2 * kv_heads, head_dim], contiguous; q is changed in place
        num_heads: query heads
        rotary: cosines and sines, [tokens, r] each; None: no rotation
        norms: weights [head_dim] of the norms of q and k; None: no norm
        eps, offset: see `rms_norm_reference`
        key_cache, value_cache: [blocks, kv_heads, block_size, head_dim]
        slots: int64 [tokens], block * block_size + offset

    Returns:
        [tokens, heads, head_dim], a view of qkv
    """
    tokens, all_heads, head_dim = qkv.shape
    kv_heads, page = key_cache.shape[1], key_cache.shape[2]
    cos, sin = rotary if rotary is not None else (qkv, qkv)
    query_norm, key_norm = norms if norms is not None else (qkv, qkv)
    if tokens:
        _prepare_kernel[(tokens, all_heads)](
            qkv,
            cos,
            sin,
            query_norm,
            key_norm,
            key_cache,
            value_cache,
            slots,
            eps,
            OFFSET=offset,
            HAS_NORM=norms is not None,
            HEADS=num_heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            DIM_PADDED=triton.next_power_of_2(head_dim),
            HALF=cos.shape[-1] if rotary is not None else 0,
            PAGE=page,
            num_warps=1,
        )
    return qkv[:, :num_heads]
