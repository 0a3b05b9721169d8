"""A step that runs otherwise than in the trace: the refusal names the look at values that decided, and a way out."""

import pytest
import torch
import transformers as hf

from lightning_pfo.strategy.model.tracing.ends import DeviationError
from tests.strategy.model.stages import Holder, Stages, run_plainly, run_programs

FORM = {"vocab_size": 20, "max_position_embeddings": 20, "image_size": 16, "patch_size": 8, "max_image_length": -1}
SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def vilt():
    """Draws its patches at random, all of them, and gives the mask of text and patches from layer to layer."""
    torch.manual_seed(0)
    return Holder(hf.ViltModel(hf.ViltConfig(**SIZES, **FORM, **WITHOUT_DROPOUT)))


def step(num_kept):
    ids, pixels = torch.arange(12).view(2, 6), torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(6) < num_kept).long().expand(2, 6)
    return lambda owner: (
        owner.model(input_ids=ids, attention_mask=mask, pixel_values=pixels).last_hidden_state[:, 0].square().mean()
    )


def test_a_mask_that_leaves_nothing_out_is_named_and_a_padded_token_is_the_way_out():
    stages = Stages(vilt(), step(6), num_stages=2)
    try:
        with pytest.raises(DeviationError) as refused:
            stages.run()
        assert "last looked at some at" in str(refused.value)
        assert "padding_mask.all()" in str(refused.value)
        assert "with a padded token in each sample (attention_mask 0)" in str(refused.value)
        found, _ = run_plainly(vilt(), step(5))
        assert stages.run(step(5)).item() == pytest.approx(found.item(), rel=1e-5)
    finally:
        stages.close()


def test_who_reads_gradients_in_a_step_is_told_where_to_read_them():
    def reads(owner):
        weight = owner.model[3].weight
        scale = 1.0 if weight.grad is None else 1 / (1 + weight.grad.norm())
        return owner.model(torch.arange(12.0).view(2, 6)).square().mean() * scale

    torch.manual_seed(0)
    stages = Stages(Holder(torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(4)))), reads, num_stages=2)
    try:
        stages.run()  # the last stage has gradients now
        with pytest.raises(DeviationError, match=r"reads gradients.*on_before_optimizer_step.*weight\.grad\.norm\(\)"):
            run_programs(stages.programs, [followed.step for followed in stages.copies])
    finally:
        stages.close()
