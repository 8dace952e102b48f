"""Programs of libraries that own the training loop, run as they are; a program without an end."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from costmodel.base.errors import ModelError
from e2e.commands.e2e_api import predict

TRAINER = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

rows = [{"input_ids": torch.arange(64), "labels": torch.arange(64)} for _ in range(256)]
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=512))
given = TrainingArguments("out", per_device_train_batch_size=8, gradient_accumulation_steps=2, max_steps=50, bf16=True)
Trainer(model=model, args=given, train_dataset=rows).train()
"""

LIGHTNING = """
import lightning
import torch


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))

    def training_step(self, batch, number):
        samples, classes = batch
        loss = torch.nn.functional.cross_entropy(self.layers(samples), classes)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, number):
        self.log("valid", self.layers(batch[0]).mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


data = torch.utils.data.TensorDataset(torch.randn(512, 64), torch.randint(10, (512,)))
trainer = lightning.Trainer(max_epochs=2, devices=2, strategy="ddp", enable_checkpointing=False)
trainer.fit(Classifier(), *(torch.utils.data.DataLoader(data, 32, num_workers=2) for _ in range(2)))
"""


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINER, encoding="utf-8")
    found = predict(command=["python", "train.py"], folder=tmp_path, gpu="a100-sxm-80gb")
    assert found.throughput.samples == 16
    assert any("of AdamW" in line and "equal to step" in line for line in found.notes)


@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
def test_lightning_starts_its_ranks_itself(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LIGHTNING, encoding="utf-8")
    found = predict(command=["python", "train.py"], folder=tmp_path, gpu="a100-sxm-80gb", gpus=2)
    assert found.throughput.samples == 64 and "all_reduce" in {each.kind for each in found.collectives}


# Limits of the capture, which are minutes.
SOON = "from e2e.capture import script_errors\nscript_errors.SILENT_SECONDS = 1.0\n"


def test_a_program_that_draws_until_values_suit_is_stopped(tmp_path: Path) -> None:
    loop = "import torch\nweight = torch.rand(8, device='cuda')\nwhile (weight > 0.5).all():\n    weight.uniform_()\n"
    (tmp_path / "endless.py").write_text(loop, encoding="utf-8")
    with pytest.raises(ModelError, match="endless.py:[34].*has read 10,000 flags that data decide and has not ended"):
        predict(command=["python", "endless.py"], folder=tmp_path, gpu="l4")


def test_a_program_without_an_end_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(SOON, encoding="utf-8")
    (tmp_path / "endless.py").write_text("import torch\ntorch.zeros(8).cuda()\nwhile True: pass\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ModelError, match="endless.py.*has called no operator for a long time and has not ended"):
        predict(command=["python", "endless.py"], folder=tmp_path, gpu="l4")
