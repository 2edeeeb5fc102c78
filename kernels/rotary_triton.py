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
    HEAD_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    dims = tl.arange(0, DIM_PADDED)
    mask = (heads < HEADS + 2 * KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    is_query = heads < HEADS
    is_value = heads >= HEADS + KV_HEADS
    rows = qkv_ptr + ((token * (HEADS + 2 * KV_HEADS) + heads) * HEAD_DIM)[:, None]
    value = tl.load(rows + dims[None, :], mask=mask, other=0.0)
    x = value
    # The partner of dimension i in its pair is i + HALF, or i - HALF.
    partner_dims = tl.where(dims < HALF, dims + HALF, dims - HALF)
    rotated = dims < 2 * HALF
    partner_mask = mask & rotated[None, :]
    partner = tl.load(rows + partner_dims[None, :], mask=partner_mask, other=0.0)
    if HAS_NORM:
        wide = x.to(tl.float32)
        factor = tl.rsqrt(tl.sum(wide * wide, 1) / HEAD_DIM + eps)[:, None]
        in_head = dims < HEAD_DIM
        query_weight = tl.load(query_norm_ptr + dims, mask=in_head, other=0.0)[None, :]
        key_weight = tl.load(key_norm_ptr + dims, mask=in_head, other=0.0)[None, :]
        weight = tl.where(is_query[:, None], query_weight, key_weight)
        in_pair = in_head & rotated
        query_weight = tl.load(query_norm_ptr + partner_dims, mask=in_pair, other=0.0)[None, :]
        key_weight = tl.load(key_norm_ptr + partner_dims, mask=in_pair, other=0.0)[None, :]
        partner_weight = tl.where(is_query[:, None], query_weight, key_weight)
        partner_wide = partner.to(tl.float32) * factor
        if OFFSET != 0.0:
            x = (wide * factor * (OFFSET + weight.to(tl.float32))).to(value.dtype)
            partner = (partner_wide * (OFFSET + partner_weight.to(tl.float32))).to(value.dtype)
        else:
            x = weight * (wide * factor).to(value.dtype)
            partner = partner_weight * partner_wide.to(value.dtype)
    if HALF > 0:
        angle = tl.where(dims < HALF, dims, dims - HALF)
        cos = tl.load(cos_ptr + token * HALF + angle, mask=rotated, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + token * HALF + angle, mask=rotated, other=0.0).to(tl.float32)
        sin = tl.where(dims < HALF, -sin, sin)
        turned = x.to(tl.float32) * cos[None, :] + partner.to(tl.float32) * sin[None, :]
        x = tl.where(rotated[None, :], turned.to(value.dtype), x)
    # Programs of one token touch disjoint heads, so writing in place is safe.
    tl.store(rows + dims[None, :], x, mask=mask & is_query[:, None])
    slot = tl.load(slot_ptr + token)
    kv_heads = tl.where(is_value, heads - HEADS - KV_HEADS, heads - HEADS)
    places = ((slot // PAGE * KV_HEADS + kv_heads) * PAGE + slot % PAGE) * HEAD_DIM
    offsets = places[:, None] + dims[None, :]
    is_key = (heads >= HEADS) & (heads < HEADS + KV_HEADS)
    tl.store(key_cache_ptr + offsets, x, mask=mask & is_key[:, None])
    tl.store(value_cache_ptr + offsets, value, mask=mask & is_value[:, None])


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
    head_block = 4 if tokens <= 64 else 16  # few tokens: more programs; many: wider ones
    if tokens:
        _prepare_kernel[(tokens, triton.cdiv(all_heads, head_block))](
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
            HEAD_BLOCK=head_block,
            num_warps=4 if tokens > 64 else 1,
        )
    return qkv[:, :num_heads]
