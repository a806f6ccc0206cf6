"""DoRA and bottleneck adapters against `peft` and plain torch: the same losses, gradients and norms with any cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from shardcompute.finetune.local_pipeline import LocalPipeline
from shardcompute.finetune.plan import FinetunePlan, LoraShape
from support.finetuning import PeftRun, batches_of, open_pipeline, open_stages, open_tiny, random_examples
from support.models.tiny import save_tiny
from support.models.tiny_checkpoint import save_tiny_llama

STEPS = 30
CUTS = ((0, 6), (0, 1, 3, 6))


def plan_of(kind: str, **options: object) -> FinetunePlan:
    lora = LoraShape(rank=4, alpha=8.0, kind=kind, **options)  # type: ignore[arg-type]
    return FinetunePlan(
        steps=STEPS, batch=4, micro_batches=2, rate=1e-3, warmup=5, weight_decay=0.01, longest=32, lora=lora
    )


@pytest.mark.parametrize("steps", [6, pytest.param(STEPS, marks=pytest.mark.long)])
def test_dora_has_the_curves_of_peft_with_any_number_of_stages(steps: int, tmp_path: Path) -> None:
    base = save_tiny_llama(tmp_path / "base")
    plan, examples = plan_of("dora"), random_examples(20)
    with open_tiny(base) as checkpoint:
        reference = PeftRun(base, checkpoint, plan, tmp_path / "begin")
        runs = [open_pipeline(checkpoint, edges, plan, recomputes=edges == CUTS[1]) for edges in CUTS]
    for step in range(steps):
        batches = batches_of(examples, plan, step)
        expected = reference.learn(step, batches)
        for run in runs:
            outcome = run.learn(step, batches)
            np.testing.assert_allclose([outcome.loss, outcome.norm], expected, rtol=1e-5)
    states = [run.state() for run in runs]
    assert any("lora_magnitude_vector" in name for name in states[0])
    for name, values in states[0].items():
        for other in states[1:]:
            np.testing.assert_array_equal(other[name], values, err_msg=name)


@pytest.mark.parametrize("family", ["llama-biases", "phi3"])
def test_dora_has_the_gradients_of_peft_where_maps_are_fused_or_biased(family: str, tmp_path: Path) -> None:
    base = save_tiny(family, tmp_path / "base")
    plan, examples = plan_of("dora", is_rank_stabilised=True), random_examples(9)
    with open_tiny(base) as checkpoint:
        reference = PeftRun(base, checkpoint, plan, tmp_path / "begin")
        stages = open_stages(checkpoint, (0, 2, 3), plan)
    pipeline = LocalPipeline(stages, plan)
    for step in range(3):
        batches = batches_of(examples, plan, step)
        outcome, expected = pipeline.learn(step, batches), reference.learn(step, batches)
        np.testing.assert_allclose([outcome.loss, outcome.norm], expected, rtol=1e-4)
    batch = batches_of(examples, plan, 3)[0]
    stages[1].forward(batch, stages[0].forward(batch))
    stages[0].backward(0, stages[1].backward(0))
    reference.optimizer.zero_grad()
    reference.loss(batch).backward()
    found = {**stages[0].gradients(), **stages[1].gradients()}
    wanted = {
        name.replace("lora_magnitude_vector.weight", "lora_magnitude_vector"): values
        for name, values in reference.gradients().items()
    }
    assert wanted.keys() == found.keys()
    size = max(np.abs(each).max() for each in wanted.values())
    for name, values in wanted.items():
        np.testing.assert_allclose(found[name], values, atol=1e-5 * size, rtol=1e-3, err_msg=name)


class Bottlenecks(torch.nn.Module):
    """A plain model of `transformers` with a small network behind each block's last map."""

    def __init__(self, folder: Path, begin: dict[str, np.ndarray]) -> None:
        super().__init__()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.requires_grad_(False)
        self.learned: dict[str, torch.Tensor] = {
            name: torch.from_numpy(values.copy()).requires_grad_() for name, values in begin.items()
        }
        for name, module in self.model.named_modules():
            prefix = f"base_model.model.{name}.bottleneck"
            if f"{prefix}_up.bias" in self.learned:
                module.register_forward_hook(self._hook(prefix))

    def _hook(self, prefix: str) -> object:
        def change(_module: object, _args: object, y: torch.Tensor) -> torch.Tensor:
            inner = y @ self.learned[f"{prefix}_down.weight"].T + self.learned[f"{prefix}_down.bias"]
            up, bias = (self.learned[f"{prefix}_up.{part}"] for part in ("weight", "bias"))
            return y + inner.clamp(min=0) @ up.T + bias

        return change


def test_bottlenecks_learn_as_plain_torch_does(tmp_path: Path) -> None:
    base = save_tiny_llama(tmp_path / "base", layers=3)
    plan, examples = plan_of("bottleneck"), random_examples(12)
    with open_tiny(base) as checkpoint:
        runs = [open_pipeline(checkpoint, edges, plan) for edges in ((0, 3), (0, 1, 3))]
    names = {name.rpartition(".layers.")[2][2:] for name in runs[0].state() if name.startswith("base_model")}
    assert {name.partition(".bottleneck")[0] for name in names} == {"self_attn.o_proj", "mlp.down_proj"}
    begin = {name: values for name, values in runs[0].state().items() if name.startswith("base_model.")}
    plain = Bottlenecks(base, begin)
    reference = object.__new__(PeftRun)
    reference.model, reference.plan = plain.model, plan
    reference.trained = list(plain.learned.values())
    reference.optimizer = torch.optim.AdamW(
        reference.trained, lr=plan.rate, betas=plan.betas, eps=plan.epsilon, weight_decay=plan.weight_decay
    )
    for step in range(8):
        batches = batches_of(examples, plan, step)
        expected = reference.learn(step, batches)
        for run in runs:
            outcome = run.learn(step, batches)
            np.testing.assert_allclose([outcome.loss, outcome.norm], expected, rtol=1e-5)
