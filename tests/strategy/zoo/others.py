"""Models of transformers that see, hear, or forecast, and those of two modalities."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.strategy.zoo.case import NUM_CLASSES, MakeBatch, Module, case, images
from tests.strategy.zoo.text import FEED_FORWARD, GROUPED, OwnLoss, configured, text, transformers_case

SIZE = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 24}
IMAGES = {**SIZE, "image_size": 32, "patch_size": 8}
LABELS = {"num_labels": NUM_CLASSES}


def pictures(size: int = 32, batch_size: int = 8, labelled: bool = True) -> MakeBatch:
    """Images by the names that transformers gives them."""

    def make(generator: torch.Generator) -> Any:
        x, y = images(size, batch_size)(generator)
        return {"pixel_values": x, "labels": y} if labelled else {"pixel_values": x}

    return make


def vision(name: str, family: str, size: int = 32, batch_size: int = 8, **options: Any) -> None:
    """Register a classifier of images."""
    transformers_case(
        name,
        f"{family}ForImageClassification",
        lambda: configured(f"{family}Config", **options, **LABELS),
        pictures(size, batch_size),
    )


vision("vit", "ViT", **IMAGES)
vision("deit", "DeiT", **IMAGES)
vision("dinov2", "Dinov2", **IMAGES)
vision("beit_relative_bias", "Beit", **IMAGES, use_relative_position_bias=True)
vision("beit_shared_bias", "Beit", **IMAGES, use_shared_relative_position_bias=True)
vision("swin", "Swin", image_size=32, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4)
vision("swinv2", "Swinv2", image_size=32, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4)
vision("convnext", "ConvNext", hidden_sizes=[8, 16, 24, 32], depths=[2, 2, 2, 2])
vision("convnextv2", "ConvNextV2", hidden_sizes=[8, 16, 24, 32], depths=[2, 2, 2, 2])
vision("resnet", "ResNet", batch_size=16, embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1],
       layer_type="basic")  # fmt: skip
vision("regnet", "RegNet", batch_size=16, embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1],
       groups_width=4)  # fmt: skip
vision("segformer_classifier", "Segformer", hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1],
       decoder_hidden_size=16, num_attention_heads=[1, 2, 2, 2])  # fmt: skip
vision("mobilevit", "MobileViT", size=64, batch_size=16, image_size=64, hidden_sizes=[16, 24, 32],
       neck_hidden_sizes=[8, 8, 16, 16, 24, 24, 48], num_attention_heads=2)  # fmt: skip
vision("poolformer", "PoolFormer", hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1])


def segmentation(generator: torch.Generator) -> Any:
    """Images, and a class for each pixel."""
    labels = torch.randint(NUM_CLASSES, (8, 32, 32), generator=generator)
    return {"pixel_values": torch.randn(8, 3, 32, 32, generator=generator), "labels": labels}


transformers_case(
    "segformer",
    "SegformerForSemanticSegmentation",
    lambda: configured("SegformerConfig", hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], decoder_hidden_size=16,
                       num_attention_heads=[1, 2, 2, 2], **LABELS),
    segmentation,
)  # fmt: skip


@case("transformers", needs="transformers")
def vit_mae() -> Any:
    from transformers import ViTMAEForPreTraining

    decoder = {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 2, "decoder_num_attention_heads": 2}
    config = configured("ViTMAEConfig", **IMAGES, **decoder, decoder_intermediate_size=24)

    def make(generator: torch.Generator) -> Any:
        batch = pictures(labelled=False)(generator)
        return {**batch, "noise": torch.rand(8, 16, generator=generator)}  # says which patches are hidden

    return OwnLoss(ViTMAEForPreTraining(config)), make


transformers_case(
    "vit_mae_drawing",
    "ViTMAEForPreTraining",
    lambda: configured("ViTMAEConfig", **IMAGES, decoder_hidden_size=16, decoder_num_hidden_layers=2,
                       decoder_num_attention_heads=2, decoder_intermediate_size=24),
    pictures(labelled=False),
    draws=True,
)  # fmt: skip


def _towers(kind: str) -> dict[str, Any]:
    text_config = {**FEED_FORWARD, "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1}
    more = {"projection_dim": 8} if kind == "CLIP" else {"projection_size": 16}
    return {"text_config": {**text_config, **more}, "vision_config": IMAGES}


def pairs(generator: torch.Generator) -> Any:
    """Texts with images."""
    batch = text(padded=False)(generator)
    return {"input_ids": batch["input_ids"], "pixel_values": images(32, 8)(generator)[0]}


class Contrastive(Module):
    """Towers whose loss of pairs does not couple samples: their similarity alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.model(**batch)
        return -functional.logsigmoid((output.text_embeds * output.image_embeds).sum(-1)).mean()


@case("transformers", needs="transformers")
def clip() -> Any:
    from transformers import CLIPModel

    return Contrastive(CLIPModel(configured("CLIPConfig", **_towers("CLIP"), projection_dim=8))), pairs


@case("transformers", needs="transformers")
def siglip() -> Any:
    from transformers import SiglipModel

    return Contrastive(SiglipModel(configured("SiglipConfig", **_towers("Siglip")))), pairs


@case("transformers", needs="transformers")
def llava() -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaForConditionalGeneration

    config = configured(
        "LlavaConfig",
        vision_config=CLIPVisionConfig(**IMAGES),
        text_config=LlamaConfig(**GROUPED),
        image_token_index=4,
        image_token_id=4,
    )

    def make(generator: torch.Generator) -> Any:
        batch = text(length=28, padded=False)(generator)
        batch["input_ids"][:, 2:18] = 4  # 16 patches
        return {**batch, "pixel_values": images(32, 8)(generator)[0]}

    return OwnLoss(LlavaForConditionalGeneration(config)), make


def blip_pairs(generator: torch.Generator) -> Any:
    """Images and what is to be said of them."""
    return {**text()(generator), "pixel_values": images(32, 8)(generator)[0]}


transformers_case(
    "git",
    "GitForCausalLM",
    lambda: configured("GitConfig", **FEED_FORWARD, vision_config=IMAGES, bos_token_id=1, eos_token_id=2),
    blip_pairs,
)
transformers_case(
    "vision_encoder_decoder",
    "VisionEncoderDecoderModel",
    lambda: _vision_encoder_decoder(),
    lambda generator: {
        "pixel_values": images(32, 8)(generator)[0],
        "labels": text(padded=False)(generator)["labels"],
    },
)


def _vision_encoder_decoder() -> Any:
    from transformers import VisionEncoderDecoderConfig

    decoder = configured("GPT2Config", vocab_size=40, n_embd=16, n_layer=4, n_head=2, n_positions=32)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(configured("ViTConfig", **IMAGES), decoder)
    config.decoder_start_token_id = config.pad_token_id = 0
    return config


# ---- sound ----

_CONVOLUTIONS = {"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2}
_SPEECH = {**SIZE, **_CONVOLUTIONS, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, **LABELS,
           "vocab_size": 12, "classifier_proj_size": 8, "apply_spec_augment": False}  # fmt: skip


def waves(generator: torch.Generator) -> Any:
    """Sound, and a class for each."""
    x = torch.randn(8, 800, generator=generator)
    return {"input_values": x, "labels": torch.randint(NUM_CLASSES, (8,), generator=generator)}


def sound(name: str, family: str, keep: tuple[str, ...] = (), draws: bool = False, **options: Any) -> None:
    """Register a classifier of sound."""
    transformers_case(
        name,
        f"{family}ForSequenceClassification",
        lambda: configured(f"{family}Config", keep, **_SPEECH, **options),
        waves,
        draws=draws,
    )


sound("wav2vec2", "Wav2Vec2")
sound("wav2vec2_layerdrop", "Wav2Vec2", ("layerdrop",), draws=True, layerdrop=0.1)
sound("hubert", "Hubert")
sound("wavlm", "WavLM")


@case("transformers", needs="transformers")
def wav2vec2_ctc() -> Any:
    from transformers import Wav2Vec2ForCTC

    def make(generator: torch.Generator) -> Any:
        labels = torch.randint(1, 12, (8, 5), generator=generator)
        return {"input_values": waves(generator)["input_values"], "labels": labels}

    return OwnLoss(Wav2Vec2ForCTC(configured("Wav2Vec2Config", **_SPEECH, ctc_loss_reduction="mean"))), make


@case("transformers", needs="transformers")
def whisper() -> Any:
    from transformers import WhisperForConditionalGeneration

    layers = {"encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = configured("WhisperConfig", vocab_size=40, d_model=16, encoder_ffn_dim=24, decoder_ffn_dim=24, **layers,
                        num_mel_bins=8, max_source_positions=16, max_target_positions=16, pad_token_id=0,
                        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)  # fmt: skip

    def make(generator: torch.Generator) -> Any:
        labels = text(padded=False)(generator)["labels"]
        return {"input_features": torch.randn(8, 8, 32, generator=generator), "labels": labels}

    return OwnLoss(WhisperForConditionalGeneration(config)), make


@case("transformers", needs="transformers")
def audio_spectrogram() -> Any:
    from transformers import ASTForAudioClassification

    config = configured("ASTConfig", **SIZE, patch_size=4, max_length=16, num_mel_bins=16, time_stride=4,
                        frequency_stride=4, **LABELS)  # fmt: skip

    def make(generator: torch.Generator) -> Any:
        x = torch.randn(8, 16, 16, generator=generator)
        return {"input_values": x, "labels": torch.randint(NUM_CLASSES, (8,), generator=generator)}

    return OwnLoss(ASTForAudioClassification(config)), make


# ---- others ----


@case("transformers", needs="transformers")
def patch_tst() -> Any:
    from transformers import PatchTSTForPrediction

    config = configured("PatchTSTConfig", num_input_channels=2, context_length=16, prediction_length=4, patch_length=4,
                        patch_stride=4, d_model=16, num_hidden_layers=4, num_attention_heads=2, ffn_dim=24,
                        loss="mse")  # fmt: skip

    def make(generator: torch.Generator) -> Any:
        x = torch.randn(8, 20, 2, generator=generator)
        return {"past_values": x[:, :16], "future_values": x[:, 16:]}

    return OwnLoss(PatchTSTForPrediction(config)), make


@case("transformers", needs="transformers")
def decision_transformer() -> Any:
    from transformers import DecisionTransformerModel

    class Imitation(Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = DecisionTransformerModel(
                configured("DecisionTransformerConfig", state_dim=5, act_dim=3, hidden_size=16, n_layer=4, n_head=2,
                           max_ep_len=16)
            )  # fmt: skip

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return functional.mse_loss(self.model(**batch).action_preds, batch["actions"])

    def make(generator: torch.Generator) -> Any:
        def random(size: int) -> Tensor:
            return torch.randn(8, 6, size, generator=generator)

        steps = torch.arange(6).repeat(8, 1)
        return {
            "states": random(5),
            "actions": random(3).tanh(),
            "rewards": random(1),
            "returns_to_go": random(1),
            "timesteps": steps,
            "attention_mask": torch.ones(8, 6),
        }

    return Imitation(), make


@case("transformers", needs="transformers")
def videomae() -> Any:
    from transformers import VideoMAEForVideoClassification

    config = configured("VideoMAEConfig", **IMAGES, num_frames=4, tubelet_size=2, **LABELS)

    def make(generator: torch.Generator) -> Any:
        x = torch.randn(8, 4, 3, 32, 32, generator=generator)
        return {"pixel_values": x, "labels": torch.randint(NUM_CLASSES, (8,), generator=generator)}

    return OwnLoss(VideoMAEForVideoClassification(config)), make
