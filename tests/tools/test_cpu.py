"""megatron_eopt.tools.cpu: Megatron trains on a CPU, and afterwards the process is as it was."""

import os
import re
import sys
import threading

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

import megatron_eopt.tools.cpu
from tests.megatron.runs import LAUNCHER, MUON, ROOT, SMALL_GPT, TP2, start


@pytest.fixture
def cpu_run():
    """Installed for one test; where there is a GPU it refuses to be, and only the tests with ranks of their own run."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is in use")
    megatron_eopt.tools.cpu.install()
    yield megatron_eopt.tools.cpu
    megatron_eopt.tools.cpu.undo()


def environment():
    """Of a process that sees no GPU and was not told anything about how to run on a CPU."""
    ours = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ours["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    unwanted = ("TORCHDYNAMO_DISABLE", "CUDA_DEVICE_MAX_CONNECTIONS", "GLOO_SOCKET_IFNAME")
    return {name: value for name, value in os.environ.items() if name not in unwanted} | ours


# ---- installing, undoing, refusing


def test_undo_restores_every_attribute(cpu_run):
    """Also where it is installed twice, or undone."""
    cpu_run.undo()
    import megatron.core.datasets.utils
    import megatron.core.tensor_parallel.random
    import megatron.training.training
    import torch._dynamo.eval_frame
    import torch.distributed.distributed_c10d

    owners = [torch, torch.Tensor, torch.nn.Module, torch.jit, torch.accelerator, torch.utils._device.DeviceContext]
    owners += [torch.cuda, torch.cuda.random, torch.cuda.memory, torch.cuda.streams, torch.cuda.nvtx, dist]
    owners += [dist.distributed_c10d, dist.ProcessGroup, torch._dynamo.eval_frame, megatron.core.datasets.utils]
    owners += [megatron.core.tensor_parallel.random, megatron.training.initialize, megatron.training.training]
    before, environment = [dict(vars(owner)) for owner in owners], dict(os.environ)
    for _ in range(2):
        cpu_run.install()
    assert cpu_run.installed()
    assert torch.cuda.is_available()
    for _ in range(2):
        cpu_run.undo()
    assert not cpu_run.installed()
    assert dict(os.environ) == environment
    for owner, old in zip(owners, before, strict=True):
        new = vars(owner)
        assert not [name for name in old.keys() | new.keys() if old.get(name) is not new.get(name)], owner


@pytest.mark.parametrize(
    ("gpu", "message"), [(True, r"3 GPU.*CUDA_VISIBLE_DEVICES=.*without --cpu"), (False, "'nccl'")]
)
def test_refuses_where_a_gpu_or_another_backend_is(monkeypatch, gpu, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "nccl")
    zeros = torch.zeros
    with pytest.raises(RuntimeError, match=message):
        megatron_eopt.tools.cpu.install()
    assert not megatron_eopt.tools.cpu.installed()
    assert torch.zeros is zeros


# ---- what a GPU was asked for, the CPU does


def test_cuda_means_the_cpu(cpu_run):
    cuda = torch.device("cuda", 0)

    def made():
        x = torch.ones(2, requires_grad=True)
        x.register_hook(lambda grad: found.append(torch.zeros(1, device="cuda")))
        x.sum().backward()
        with torch.device("cuda"):
            found.append(torch.empty(2))
        found.extend(
            [
                torch.tensor([1.0], device=cuda),
                torch.empty(2, device=torch.cuda.current_device(), pin_memory=False),
                torch.empty(2, pin_memory=True),
                torch.rand(2, device="cuda:0"),
                torch.zeros_like(torch.ones(2), device="cuda"),
                torch.ones(2).new_zeros(3, device=cuda),
                torch.ones(2).cuda(),
                torch.ones(2).to(torch.cuda.current_device(), non_blocking=True),
                torch.ones(2).to(device=cuda, dtype=torch.bfloat16),
                torch.ones(2).pin_memory(),
                torch.nn.Linear(2, 2, device="cuda").cuda().to(cuda).weight,
                torch.cuda.FloatTensor([1.0, 2.0]),
            ]
        )

    found = []
    made()
    thread = threading.Thread(target=made)  # in all threads
    thread.start()
    thread.join()
    assert len(found) == 2 * 14
    assert {tensor.device.type for tensor in found} == {"cpu"}
    assert found[10].dtype == torch.bfloat16
    assert found[2].type() == "torch.cuda.FloatTensor"
    assert torch.ones(1).type("torch.cuda.HalfTensor").dtype == torch.float16
    with torch.device("meta"):  # what is not a GPU stays what it is
        assert torch.empty(2).is_meta


def test_what_was_saved_on_a_gpu_loads(cpu_run, tmp_path):
    torch.save(torch.ones(2), tmp_path / "saved.pt")
    assert torch.load(tmp_path / "saved.pt", map_location="cuda").device.type == "cpu"
    torch.cuda.set_device(1)
    torch.cuda.set_device("cuda")  # names none
    assert torch.cuda.current_device() == 1
    torch.cuda.set_device(torch.device("cuda", 0))
    assert torch.cuda.current_device() == 0


def test_the_state_of_random_numbers_is_kept_as_on_a_gpu(cpu_run):
    torch.cuda.manual_seed(3)
    state = torch.cuda.get_rng_state()
    first = torch.nn.functional.dropout(torch.ones(100))
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.nn.functional.dropout(torch.ones(100)), first)


def test_nothing_is_compiled(cpu_run):
    @torch.compile(mode="max-autotune")
    def decorated(x):
        return sys._getframe().f_code.co_name

    assert decorated(torch.ones(1)) == "decorated"
    assert torch.compile(decorated) is decorated


# ---- two ranks


@pytest.mark.wide
def test_dropout_is_alike_on_ranks_and_after_a_resume(tmp_path):
    """Where one of the ranks reads the data, as in Megatron's own script; the run compares gradients of its ranks."""
    script = [*LAUNCHER[:-1], str(ROOT / "examples" / "pretrain_gpt.py")]
    flags = [*SMALL_GPT, *MUON, *TP2, "--num-layers", 2, "--train-iters", 4, "--num-workers", 1]
    flags += ["--hidden-dropout", 0.1, "--attention-dropout", 0.1, "--save", tmp_path, "--save-interval", 2]

    def steps(*further):
        done = start(2, *flags, *further, program=script)
        assert not done.returncode, done.stdout[-3000:]
        return re.findall(r"iteration +(\d+)/.* grad norm: (\S+)", done.stdout)

    straight = steps()
    assert [number for number, _ in straight] == ["1", "2", "3", "4"]
    assert steps("--load", tmp_path, "--ckpt-step", 2) == straight[2:]
