"""Language models of transformers: decoders, encoders, both, mixtures of experts, state spaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.strategy.zoo.case import NUM_CLASSES, MakeBatch, Module, case

VOCABULARY = 40
SIZE = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
FEED_FORWARD = {**SIZE, "intermediate_size": 24, "max_position_embeddings": 64}
GROUPED = {**FEED_FORWARD, "num_key_value_heads": 1}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {**GROUPED, "output_router_logits": True, "router_aux_loss_coef": 0.1}


class OwnLoss(Module):
    """A model of transformers that computes its loss from labels."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__()
        self.model = model
        self.options = options

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(**batch, **self.options).loss


def configured(name: str, keep: tuple[str, ...] = (), **options: Any) -> Any:
    """A config of transformers without dropout of any kind, and with weights that are no longer near zero.

    Args:
        name: Name of the config's class.
        keep: Probabilities that are kept.
        **options: Its arguments.
    """
    import transformers

    config = getattr(transformers, name)(**options)
    _settle(config, keep)
    return config


def _settle(config: Any, keep: tuple[str, ...]) -> None:
    for key, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            _settle(value, keep)
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and key not in keep:
            is_probability = "drop" in key or key.endswith("pdrop")
            if is_probability and 0 < value < 1:
                setattr(config, key, 0.0)
            elif key in ("initializer_range", "init_std"):
                setattr(config, key, 0.1)


def transformers_case(
    name: str, model: str, config: Callable[[], Any], make_batch: MakeBatch, draws: bool = False, **options: Any
) -> None:
    """Register a model by its class; `options` go to its forward."""

    def make() -> Any:
        import transformers

        return OwnLoss(getattr(transformers, model)(config()), **options), make_batch

    case("transformers", name, needs="transformers", draws=draws)(make)


def text(batch_size: int = 8, length: int = 12, padded: bool = True, classes: bool = False) -> MakeBatch:
    """Token numbers with a mask, and labels: the tokens, or a class."""

    def make(generator: torch.Generator) -> Any:
        ids = torch.randint(5, VOCABULARY, (batch_size, length), generator=generator)
        mask = torch.ones_like(ids)
        if padded:
            mask[::2, length - 3 :] = 0
        labels = torch.randint(NUM_CLASSES, (batch_size,), generator=generator) if classes else ids.clone()
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    return make


def decoder(name: str, family: str, draws: bool = False, **options: Any) -> None:
    """Register a causal language model."""
    transformers_case(name, f"{family}ForCausalLM", lambda: configured(f"{family}Config", **options), text())


decoder("llama", "Llama", **GROUPED)
decoder("qwen2_tied", "Qwen2", **GROUPED, tie_word_embeddings=True)
decoder("qwen3", "Qwen3", **GROUPED, head_dim=8)
decoder("mistral_sliding", "Mistral", **GROUPED, sliding_window=4)
decoder("gemma2", "Gemma2", **GROUPED, head_dim=8, **SPECIAL)
decoder("olmo2", "Olmo2", **GROUPED, **SPECIAL)
decoder("phi", "Phi", **FEED_FORWARD)
decoder("phi3", "Phi3", **GROUPED, **SPECIAL)
decoder("gpt_neox", "GPTNeoX", **FEED_FORWARD)
decoder("falcon", "Falcon", **SIZE)
decoder("bloom", "Bloom", vocab_size=VOCABULARY, hidden_size=16, n_layer=4, n_head=2)
decoder("opt", "OPT", vocab_size=VOCABULARY, hidden_size=16, ffn_dim=24, num_hidden_layers=4, num_attention_heads=2,
        max_position_embeddings=32, word_embed_proj_dim=8)  # fmt: skip
decoder("mamba", "Mamba", vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=4, use_cache=False)
decoder("mamba2", "Mamba2", vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=4, num_heads=4,
        head_dim=8, n_groups=1, chunk_size=4, use_cache=False)  # fmt: skip
decoder("rwkv", "Rwkv", vocab_size=VOCABULARY, hidden_size=16, attention_hidden_size=16, num_hidden_layers=4,
        context_length=32, use_cache=False)  # fmt: skip
decoder("deepseek_v3", "DeepseekV3", **FEED_FORWARD, num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2,
        n_group=2, topk_group=1, first_k_dense_replace=2, moe_intermediate_size=8, kv_lora_rank=8, q_lora_rank=8,
        qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8)  # fmt: skip
decoder("mixtral", "Mixtral", **EXPERTS, num_local_experts=4, num_experts_per_tok=2)
decoder("qwen2_moe", "Qwen2Moe", **EXPERTS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
        shared_expert_intermediate_size=8)  # fmt: skip
decoder("olmoe", "Olmoe", **EXPERTS, num_experts=4, num_experts_per_tok=2, pad_token_id=0)
decoder("jamba", "Jamba", **GROUPED, num_experts=2, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
        expert_layer_offset=1, mamba_d_state=4, mamba_dt_rank=4, use_mamba_kernels=False, **SPECIAL)  # fmt: skip


def _gpt2() -> Any:
    return configured("GPT2Config", vocab_size=VOCABULARY, n_embd=16, n_layer=4, n_head=2, n_positions=32)


transformers_case("gpt2", "GPT2LMHeadModel", _gpt2, text())
transformers_case("gpt2_classifier", "GPT2ForSequenceClassification",
                  lambda: configured("GPT2Config", vocab_size=VOCABULARY, n_embd=16, n_layer=4, n_head=2,
                                     n_positions=32, num_labels=NUM_CLASSES, pad_token_id=0),
                  text(classes=True))  # fmt: skip


def encoder(name: str, family: str, head: str = "ForMaskedLM", classes: bool = False, **options: Any) -> None:
    """Register an encoder of text."""
    labels = {"num_labels": NUM_CLASSES} if classes else {}
    transformers_case(
        name, f"{family}{head}", lambda: configured(f"{family}Config", **options, **labels), text(classes=classes)
    )


encoder("bert", "Bert", **FEED_FORWARD)
encoder("bert_classifier", "Bert", "ForSequenceClassification", classes=True, **FEED_FORWARD)
encoder("roberta", "Roberta", **FEED_FORWARD, **SPECIAL)
encoder("electra", "Electra", **FEED_FORWARD, embedding_size=8)
encoder("albert", "Albert", **FEED_FORWARD, embedding_size=8)
encoder("albert_groups", "Albert", **FEED_FORWARD, embedding_size=8, num_hidden_groups=2, inner_group_num=2)
encoder("distilbert", "DistilBert", vocab_size=VOCABULARY, dim=16, n_layers=4, n_heads=2, hidden_dim=24,
        max_position_embeddings=32)  # fmt: skip
encoder("deberta_v2", "DebertaV2", **FEED_FORWARD, relative_attention=True, pos_att_type=["p2c", "c2p"],
        position_buckets=8)  # fmt: skip
encoder("modernbert", "ModernBert", **FEED_FORWARD, **SPECIAL, cls_token_id=1, sep_token_id=2,
        global_attn_every_n_layers=2, local_attention=4)  # fmt: skip
encoder("mobilebert", "MobileBert", **FEED_FORWARD, embedding_size=8, intra_bottleneck_size=8, true_hidden_size=8,
        num_feedforward_networks=2)  # fmt: skip
encoder("xlnet", "XLNet", "ForSequenceClassification", classes=True, vocab_size=VOCABULARY, d_model=16, n_layer=4,
        n_head=2, d_inner=24)  # fmt: skip
encoder("funnel", "Funnel", "ForSequenceClassification", classes=True, vocab_size=VOCABULARY, block_sizes=[2, 2, 2],
        d_model=16, n_head=2, d_head=8, d_inner=24, num_decoder_layers=1)  # fmt: skip
encoder("perceiver", "Perceiver", vocab_size=VOCABULARY, num_latents=8, d_latents=16, d_model=16, num_blocks=2,
        num_self_attends_per_block=2, num_self_attention_heads=2, num_cross_attention_heads=2, qk_channels=16,
        v_channels=16, max_position_embeddings=12)  # fmt: skip


def both(name: str, model: str, config: str, **options: Any) -> None:
    """Register an encoder and decoder."""
    transformers_case(name, model, lambda: configured(config, **options), text())


_LAYERS = {"encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
_BART = {"vocab_size": VOCABULARY, "d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, **_LAYERS}
_T5 = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 3, "num_heads": 2}
both("t5", "T5ForConditionalGeneration", "T5Config", **_T5, num_decoder_layers=3, decoder_start_token_id=0)
both("t5_gated_untied", "T5ForConditionalGeneration", "T5Config", **_T5, decoder_start_token_id=0,
     feed_forward_proj="gated-gelu", tie_word_embeddings=False)  # fmt: skip
both("bart", "BartForConditionalGeneration", "BartConfig", **_BART, max_position_embeddings=32, **SPECIAL,
     decoder_start_token_id=1)  # fmt: skip
both("marian", "MarianMTModel", "MarianConfig", **_BART, max_position_embeddings=32, **SPECIAL,
     decoder_start_token_id=1)  # fmt: skip
both("switch_transformers", "SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig", **_T5,
     decoder_start_token_id=0, num_experts=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
     router_jitter_noise=0.0)  # fmt: skip
both("nllb_moe", "NllbMoeForConditionalGeneration", "NllbMoeConfig", **_BART, **SPECIAL, decoder_start_token_id=1,
     num_experts=4, encoder_sparse_step=2, decoder_sparse_step=2, expert_capacity=64, router_jitter_noise=0.0,
     encoder_layerdrop=0.0, decoder_layerdrop=0.0)  # fmt: skip


class UsesIntermediates(Module):
    """A step that uses what all layers computed: hidden states or attentions."""

    def __init__(self, model: nn.Module, what: str) -> None:
        super().__init__()
        self.model = model
        self.what = what

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.model(**batch, **{f"output_{self.what}": True})
        return output.loss + 0.1 * sum(part.square().mean() for part in output[self.what])


def _make(model: str, config: str, **options: Any) -> Any:
    import transformers

    return getattr(transformers, model)(configured(config, **options))


@case("transformers", needs="transformers")
def output_hidden_states() -> Any:
    return UsesIntermediates(_make("LlamaForCausalLM", "LlamaConfig", **GROUPED), "hidden_states"), text()


@case("transformers", needs="transformers")
def output_attentions() -> Any:
    model = _make("BertForMaskedLM", "BertConfig", **FEED_FORWARD, attn_implementation="eager")
    return UsesIntermediates(model, "attentions"), text()


@case("transformers", needs="transformers")
def inputs_embeds() -> Any:
    class SoftPrompt(Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = _make("LlamaForCausalLM", "LlamaConfig", **GROUPED)
            self.prompt = nn.Parameter(torch.randn(1, 3, 16))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            embeddings = self.model.get_input_embeddings()(batch["input_ids"])
            together = torch.cat([self.prompt.expand(len(embeddings), -1, -1), embeddings], 1)
            logits = self.model(inputs_embeds=together).logits[:, 3:]
            return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    return SoftPrompt(), text()


@case("transformers", needs="transformers")
def last_four_hidden_states() -> Any:
    class Pooled(Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = _make("BertModel", "BertConfig", **FEED_FORWARD)
            self.classifier = nn.Linear(16, NUM_CLASSES)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            output = self.model(batch["input_ids"], batch["attention_mask"], output_hidden_states=True)
            pooled = torch.stack(output.hidden_states[-4:]).mean((0, 2))
            return functional.cross_entropy(self.classifier(pooled), batch["labels"])

    return Pooled(), text(classes=True)
