# SPDX-License-Identifier: Apache-2.0
"""Models that several files of tests build."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel


def build_llama(**options: Any) -> PreTrainedModel:
    """Three blocks and seven norms, six of which follow an add; even numbers of everything."""
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=63,
        bos_token_id=1,
        **options,
    )
    return randomised(LlamaForCausalLM(config))


def randomised(model: PreTrainedModel) -> PreTrainedModel:
    """With norm weights and biases of no meaning: ones and zeros would hide a mix-up."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()
