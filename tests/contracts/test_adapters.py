"""Adapters of peft under transformers' Trainer and TRL, and accelerate's loop, as ``docs/frameworks.md`` has them."""

import copy

import pytest
import torch

from megatron_eopt.plain import OptimizerConfig, build_optimizer
from tests.contracts.scripts import block

pytestmark = [pytest.mark.wide, pytest.mark.filterwarnings("ignore")]

SPECTRON = {"name": "spectron", "spectron_factor_pairs": [("*.lora_A.*.weight", "*.lora_B.*.weight")]}


class Data(torch.utils.data.Dataset):
    """Texts that count."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        tokens = torch.arange(index, index + 16) % 64
        return {"input_ids": tokens, "labels": tokens}


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=16, **sizes))


def of_transformers(model, optimizer, **arguments):
    from transformers import Trainer, TrainingArguments

    return Trainer(model, TrainingArguments(**arguments), train_dataset=Data(), optimizers=(optimizer, None))


def of_trl(model, optimizer, **arguments):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"word {i}": i for i in range(64)}))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="word 0", eos_token="word 1")
    data = datasets.Dataset.from_list([{"input_ids": Data()[index]["input_ids"].tolist()} for index in range(32)])
    more = {"train_dataset": data, "processing_class": tokenizer, "optimizers": (optimizer, None)}
    return trl.SFTTrainer(model, trl.SFTConfig(bf16=False, max_length=16, **arguments), **more)


@pytest.mark.parametrize("trainer", [of_transformers, of_trl])
@pytest.mark.parametrize("fields", [SPECTRON, {"name": "muon"}, {"name": "soap"}], ids=lambda fields: fields["name"])
def test_adapters_resume_to_the_same_weights(trainer, fields, tmp_path):
    peft = pytest.importorskip("peft")

    def trained(folder, **more):
        adapters = peft.LoraConfig(r=8, target_modules="all-linear", modules_to_save=["lm_head"])
        model = peft.get_peft_model(llama(), adapters)
        optimizer = build_optimizer(model, OptimizerConfig(lr=1e-2, **fields))
        names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
        of_adamw = [names.pop(id(p)) for group in optimizer.adamw.param_groups for p in group["params"]]
        assert of_adamw == ["base_model.model.lm_head.modules_to_save.default.weight"]
        assert {id(p) for group in optimizer.matrices.param_groups for p in group["params"]} == names.keys()
        saved = {"output_dir": str(folder), "max_steps": 6, "save_steps": 3, "logging_steps": 1}
        quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "per_device_train_batch_size": 4}
        begun = copy.deepcopy(model)
        run = trainer(model, optimizer, **saved, **quiet)
        run.train(**more)
        return begun, run

    begun, straight = trained(tmp_path / "straight")
    _, resumed = trained(tmp_path / "resumed", resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-3"))
    ends = zip(straight.model.named_parameters(), resumed.model.parameters(), begun.parameters(), strict=True)
    for (name, wanted), found, start in ends:
        assert torch.equal(wanted, found), name
        assert torch.equal(wanted, start) != wanted.requires_grad, name
    losses = [each["loss"] for each in straight.state.log_history if "loss" in each]
    assert losses[-1] < losses[0]


def test_the_pages_adapters_train(tmp_path, monkeypatch):
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    names = {"model": llama(), "data": Data()}
    exec(block("Trainer, PEFT, TRL"), names)
    trained = [(name, p) for name, p in names["model"].named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * 7
    assert all(p.any() for name, p in trained)
    assert len(names["optimizer"].state) == len(trained)


def test_the_pages_loop_of_accelerate_saves_what_it_trained(tmp_path, monkeypatch):
    from accelerate import Accelerator

    monkeypatch.chdir(tmp_path)
    names = {"model": llama(), "data": torch.utils.data.DataLoader(Data(), batch_size=4)}
    exec(block("accelerate"), names)
    accelerator, model = Accelerator(), llama()
    begun = copy.deepcopy(model)
    model, optimizer = accelerator.prepare(model, build_optimizer(model, "muon", lr=3e-4))
    accelerator.load_state("saved")
    for wanted, found, start in zip(names["model"].parameters(), model.parameters(), begun.parameters(), strict=True):
        assert torch.equal(wanted, found)
        assert not torch.equal(wanted, start)
    wanted, found = names["optimizer"].state_dict()["state"], optimizer.state_dict()["state"]
    assert wanted.keys() == found.keys()
    for number, state in wanted.items():
        assert all(torch.equal(torch.as_tensor(found[number][key]), torch.as_tensor(state[key])) for key in state)
