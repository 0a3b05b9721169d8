"""Tiny models of Hugging Face families with random weights, and inputs for them."""

import torch
import transformers as hf

SIZE = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2}
LLAMA_LIKE = {**SIZE, "num_key_value_heads": 1, "max_position_embeddings": 32}
OPT = {"vocab_size": 40, "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 4, "num_attention_heads": 2}
T5 = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 3, "num_decoder_layers": 3, "num_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

FAMILIES = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA_LIKE)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**LLAMA_LIKE, tie_word_embeddings=True)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**LLAMA_LIKE, sliding_window=4)),
    "gpt_neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SIZE, max_position_embeddings=32)),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=40, n_embd=16, n_layer=4, n_head=2, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
    ),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**SIZE, max_position_embeddings=32, **NO_DROPOUT)),
    "opt": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(**OPT, max_position_embeddings=32, dropout=0.0, word_embed_proj_dim=8, do_layer_norm_before=True)
    ),
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5, dropout_rate=0.0, decoder_start_token_id=0)),
    "t5_decoder": lambda: hf.models.t5.modeling_t5.T5Stack(
        hf.T5Config(**T5, dropout_rate=0.0, is_decoder=True, is_encoder_decoder=False, use_cache=False)
    ),
}


def make(family, seed=0):
    torch.manual_seed(seed)
    return FAMILIES[family]()


def inputs(family, batch_size=4, length=10, padded=True, seed=1):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 40, (batch_size, length), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        mask[::2, length - 3 :] = 0
    kwargs = {"input_ids": ids, "attention_mask": mask}
    if family != "t5_decoder":
        kwargs["labels"] = torch.randint(5, 40, (batch_size, length), generator=generator)
    return kwargs
