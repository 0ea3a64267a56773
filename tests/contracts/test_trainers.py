"""accelerate, transformers' Trainer, Lightning and Fabric train what a loop of one's own would."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.functional import cross_entropy

from megatron_eopt.matrices import concatenated
from megatron_eopt.plain import OptimizerConfig, build_optimizer
from tests.distributed.ranks import run_ranks
from tests.distributed.test_plain import INNER, NAMES, Model, optimizer_of, train

pytestmark = [pytest.mark.wide, pytest.mark.filterwarnings("ignore")]

SOME = ["muon", "soap", "lion"]


def declared(model):
    """The model with a fused weight, whose declaration has to outlive that its parameter is replaced."""
    model.blocks[0].up.weight.logical_matrices = concatenated(gate=INNER // 2, up=INNER // 2)
    return model


def under_accelerate(rank, world_size, names):
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    found = {}
    for name in names:
        model = declared(Model())
        optimizer = optimizer_of(model, name)
        accelerator = Accelerator(cpu=True)
        # accelerate offers FSDP2 where there are GPUs alone
        accelerator.state.__dict__["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False
        )
        accelerator.state.__dict__["distributed_type"] = DistributedType.FSDP
        model, optimizer = accelerator.prepare(model, optimizer)
        losses = train(model, optimizer, range(4))
        get_optimizer_state_dict(model, optimizer.optimizer)  # it can be saved
        found[name] = losses, {key: p.full_tensor() for key, p in model.named_parameters()}
        AcceleratorState._reset_state()
    return found


def test_accelerates_fsdp2_trains_as_one_process_does():
    names = [name for name in NAMES if name != "adamw"]
    for of_rank in run_ranks(under_accelerate, 2, names):
        for name, (losses, weights) in of_rank.items():
            model = declared(Model())
            before = copy.deepcopy(model)
            assert losses == pytest.approx(train(model, optimizer_of(model, name), range(4)), rel=1e-3), name
            for (key, wanted), start in zip(model.named_parameters(), before.parameters(), strict=True):
                moved = (wanted - start).abs().max()
                assert moved > 0, (name, key)
                if name not in ("soap", "shampoo", "kl_shampoo"):  # where equal eigenvalues get any basis
                    assert (weights[key] - wanted).abs().max() < 0.01 * moved, (name, key)


@pytest.mark.parametrize("name", SOME)
def test_accelerates_saved_state_goes_on_bit_for_bit(name, tmp_path):
    from accelerate import Accelerator

    def prepared():
        torch.manual_seed(0)
        model = Model()
        accelerator = Accelerator(cpu=True)
        return accelerator, *accelerator.prepare(model, build_optimizer(model, name, lr=1e-2))

    accelerator, model, optimizer = prepared()
    train(model, optimizer, range(2))
    accelerator.save_state(tmp_path)
    straight = train(model, optimizer, range(2, 4))
    accelerator, other, optimizer = prepared()
    accelerator.load_state(tmp_path)
    assert train(other, optimizer, range(2, 4)) == straight
    assert all(map(torch.equal, model.parameters(), other.parameters()))


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = torch.randint(64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize("name", SOME)
def test_transformers_trainer_resumes_to_the_same_weights(name, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    def trainer(folder):
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=16, **sizes))
        optimizer = build_optimizer(model, OptimizerConfig(name=name, lr=1e-2))
        arguments = TrainingArguments(
            output_dir=str(folder),
            max_steps=6,
            save_steps=3,
            per_device_train_batch_size=4,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            logging_steps=1,
        )
        return Trainer(model=model, args=arguments, train_dataset=Data(), optimizers=(optimizer, None))

    straight = trainer(tmp_path / "straight")
    begun = copy.deepcopy(straight.model)
    straight.train()
    resumed = trainer(tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-3"))
    pairs = zip(straight.model.named_parameters(), resumed.model.parameters(), begun.parameters(), strict=True)
    for (key, wanted), found, start in pairs:
        assert torch.equal(wanted, found), key
        assert not torch.equal(wanted, start), key


def parts():
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "embedding": nn.Embedding(10, 8),
            "hidden": nn.Linear(8, 8),
            "norm": nn.LayerNorm(8),
            "lm_head": nn.Linear(8, 10),
        }
    )


def loss_of(model, tokens):
    logits = model["lm_head"](model["norm"](model["hidden"](model["embedding"](tokens))))
    return cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())


BATCHES = [torch.randint(10, (4, 5), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]  # of an epoch
CLIPPED = 0.1  # norm of all gradients, of AdamW's parameters too


def of(model, name):
    optimizer = build_optimizer(model, OptimizerConfig(name=name, lr=1e-2))
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, 6)


def fit(name, folder, epochs, **more):
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = parts()

        def configure_optimizers(self):
            optimizer, scheduler = of(self.model, name)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def training_step(self, tokens, index):
            return loss_of(self.model, tokens)

    module = Module()
    trainer = pl.Trainer(
        max_epochs=epochs,
        gradient_clip_val=CLIPPED,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, torch.utils.data.DataLoader(BATCHES, batch_size=None), **more)
    return module.model, trainer


@pytest.mark.parametrize("name", SOME)
def test_lightning_clips_and_resumes_as_a_loop_does(name, tmp_path):
    model = parts()
    optimizer, scheduler = of(model, name)
    for tokens in BATCHES * 2:
        optimizer.zero_grad()
        loss_of(model, tokens).backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), CLIPPED) > CLIPPED
        optimizer.step()
        scheduler.step()
    straight, _ = fit(name, tmp_path / "straight", 2)
    _, stopped = fit(name, tmp_path / "stopped", 1)
    stopped.save_checkpoint(tmp_path / "one.ckpt")
    resumed, _ = fit(name, tmp_path / "resumed", 2, ckpt_path=tmp_path / "one.ckpt")
    for wanted, found, again in zip(model.parameters(), straight.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)
        assert torch.equal(found, again)
