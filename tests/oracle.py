"""openai-whisper on a checkpoint of ours: what other code computes from the same weights."""

import re
from collections.abc import Sequence

import torch
from safetensors.torch import load_file
from whisper.model import ModelDimensions, Whisper

from engine.checkpoints import Checkpoint

NAMES = [
    (r"^model\.", ""),
    (r"layers\.", "blocks."),
    (r"encoder_attn_layer_norm", "cross_attn_ln"),
    (r"self_attn_layer_norm", "attn_ln"),
    (r"encoder_attn", "cross_attn"),
    (r"self_attn", "attn"),
    (r"q_proj", "query"),
    (r"k_proj", "key"),
    (r"v_proj", "value"),
    (r"out_proj", "out"),
    (r"fc1", "mlp.0"),
    (r"fc2", "mlp.2"),
    (r"final_layer_norm", "mlp_ln"),
    (r"encoder\.layer_norm", "encoder.ln_post"),
    (r"decoder\.layer_norm", "decoder.ln"),
    (r"embed_tokens", "token_embedding"),
    (r"embed_positions\.weight", "positional_embedding"),
]


def openai_whisper(checkpoint: Checkpoint, heads: Sequence[tuple[int, int]] = ()) -> Whisper:
    """Load a checkpoint's weights into openai-whisper."""
    weights = {}
    for name, tensor in load_file(checkpoint.path / "model.safetensors").items():
        for pattern, replacement in NAMES:
            name = re.sub(pattern, replacement, name)  # noqa: PLW2901
        weights[name] = tensor.float()
    state, layers = (
        weights["decoder.positional_embedding"].shape[1],
        1 + max(int(name.split(".")[2]) for name in weights if ".blocks." in name),
    )
    dimensions = ModelDimensions(
        80, 1500, state, state // 64, layers, checkpoint.vocabulary_size, 448, state, state // 64, layers
    )
    model = Whisper(dimensions)
    model.load_state_dict(weights)
    mask = torch.zeros(layers, state // 64, dtype=torch.bool)
    for layer, head in heads:
        mask[layer, head] = True
    model.register_buffer("alignment_heads", mask.to_sparse(), persistent=False)
    return model.eval()
