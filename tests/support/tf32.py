"""A model whose attention multiplies float32 in TF32, as an Ampere GPU or newer may, computed on a CPU.

`main` computes it with vLLM's own Triton kernels, which Triton's interpreter runs. Their products are in TF32 wherever the kernel was
compiled to ask for it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AutoModelForCausalLM

from headrace.records.trajectory import Float32
from headrace_services.refit.probe import Differences, choose_token_ids, differences
from tests.support.tiny_family import shrunk

# a float32 has 23 bits of mantissa, a TF32 has 10
_KEPT = ~0x1FFF


def truncated(values: torch.Tensor) -> torch.Tensor:
    """`values` in TF32: a tensor core drops the bits, and does not round."""
    return (values.contiguous().view(torch.int32) & _KEPT).view(torch.float32)


def attention(convert: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """Causal attention of one sequence, for transformers, in which `convert` is applied to what is multiplied."""

    def attend(
        module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, *, scaling: float, **_: Any
    ) -> tuple[torch.Tensor, None]:
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        scores = convert(q) @ convert(k).transpose(-1, -2) * scaling
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        return (convert(weights) @ convert(v)).transpose(1, 2).contiguous(), None

    return attend


def moved(name: str, attend: Callable[..., Any]) -> Differences:
    """How far a small model's log-probabilities of the probe are from transformers' own, with this attention."""
    torch.manual_seed(0)
    config = shrunk("llama")
    model = AutoModelForCausalLM.from_config(config).float()
    ids = choose_token_ids(config.vocab_size)
    tokens = torch.as_tensor(ids, dtype=torch.long)

    def logprobs(implementation: str) -> Float32:
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            rows = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        return np.asarray(rows.gather(-1, tokens[1:, None])[:, 0].numpy())

    AttentionInterface.register(name, attend)
    return differences(logprobs("sdpa"), logprobs(name))


def _have_vllm_interpret() -> None:
    """Make vLLM's kernels run in Triton's interpreter, whose own products are exact whatever precision they are asked for."""
    assert os.environ["TRITON_INTERPRET"] == "1"
    from triton._C.libtriton import ir  # type: ignore[import-untyped]
    from triton.backends import backends  # type: ignore[import-untyped]
    from triton.runtime.interpreter import InterpreterBuilder  # type: ignore[import-untyped]

    # vLLM's build for CPUs uses Triton only with this backend
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
    exact = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
        if precision == ir.INPUT_PRECISION.TF32:
            for handle in (a, b):
                handle.data = truncated(torch.from_numpy(np.ascontiguousarray(handle.data))).numpy()
        return exact(self, a, b, d, precision, imprecise)

    InterpreterBuilder.create_dot = create_dot


def _attend_with_vllm(
    module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, *, scaling: float, **_: Any
) -> tuple[torch.Tensor, None]:
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    # [1, heads, tokens, size] to [tokens, heads, size]; all keys and values are in one block of the cache
    q, k, v = (each[0].transpose(0, 1).contiguous() for each in (q, k, v))
    out, n = torch.empty_like(q), len(q)
    unified_attention(
        q,
        k[None],
        v[None],
        out,
        cu_seqlens_q=torch.tensor([0, n], dtype=torch.int32),
        max_seqlen_q=n,
        seqused_k=torch.tensor([n], dtype=torch.int32),
        max_seqlen_k=n,
        softmax_scale=scaling,
        causal=True,
        window_size=(-1, -1),
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        softcap=0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
    )
    return out[None], None


def _experts_error() -> float:
    """How far vLLM's fused experts are from the exact products, each token having one of four experts."""
    from vllm.model_executor.layers.fused_moe.fused_moe import invoke_fused_moe_triton_kernel
    from vllm.triton_utils import tl

    generator = torch.Generator().manual_seed(0)
    tokens, weights = torch.randn(8, 64, generator=generator), torch.randn(4, 32, 64, generator=generator)
    chosen, out = torch.arange(8, dtype=torch.int32) % 4, torch.zeros(8, 1, 32)
    invoke_fused_moe_triton_kernel(
        tokens,
        weights,
        out,
        A_scale=None,
        B_scale=None,
        topk_weights=None,
        sorted_token_ids=None,
        expert_ids=chosen,
        num_tokens_post_padded=torch.tensor([8 * 16], dtype=torch.int32),
        mul_routed_weight=False,
        top_k=1,
        config={"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 1},
        compute_type=tl.float32,
        use_fp8_w8a8=False,
        use_int8_w8a8=False,
        use_int8_w8a16=False,
        use_int4_w4a16=False,
        per_channel_quant=False,
    )
    right = torch.einsum("tk,tnk->tn", tokens.double(), weights[chosen.long()].double())
    return float((out[:, 0] - right).abs().max())


def main() -> None:
    """Write how far both are off, as JSON. Needs TRITON_INTERPRET=1 in the process's environment."""
    _have_vllm_interpret()
    answer = {"probe": moved("vllm", _attend_with_vllm), "experts": _experts_error()}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
