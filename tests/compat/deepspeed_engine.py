"""Trains a DeepSpeed engine for one step in a process of its own, and writes down what the functions return."""

import os
import sys
from pathlib import Path

import torch
from torch import nn

from lightning_ort.compat import deepspeed as compat


def main(folder: Path) -> None:
    facts: dict = {}
    with compat.without_gpu_search():
        facts["accelerator"] = os.environ.get("DS_ACCELERATOR")
        import deepspeed
        from deepspeed.accelerator import get_accelerator, real_accelerator

    facts["accelerator after"] = os.environ.get("DS_ACCELERATOR")
    operations, accelerator = dict(deepspeed.ops.__compatible_ops__), real_accelerator.ds_accelerator
    with compat.on_cpu():
        facts["device"] = get_accelerator().device_name()
        facts["compiles"] = deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"]
        train(folder, facts)
    facts["restored"] = (
        dict(deepspeed.ops.__compatible_ops__) == operations and real_accelerator.ds_accelerator is accelerator
    )
    torch.save(facts, folder / "facts.pt")


def train(folder: Path, facts: dict) -> None:
    import deepspeed

    os.environ["LOCAL_RANK"] = "0"
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed("gloo", verbose=False, dist_init_required=False)
    module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    module[0].bias.requires_grad_(False)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.dim() > 1]},
        {"params": [parameter for parameter in trained if parameter.dim() == 1]},
    ]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    engine, zero, _, _ = deepspeed.initialize(
        model=module, optimizer=optimizer, config=config, dist_init_required=False
    )
    facts["hooks"] = [hook.id for hook in compat.forward_hooks(engine)]
    facts["module's hooks"] = [*module._forward_pre_hooks, *module._forward_hooks]
    facts["no engine"] = compat.forward_hooks(module)
    engine.backward(engine(torch.ones(2, 3)).sum())
    engine.step()

    numbers = {id(parameter): number for number, parameter in enumerate(trained)}
    flattened = compat.flattened_groups(zero)
    facts["groups"] = [[numbers[id(parameter)] for parameter, _ in group] for group in flattened]
    facts["same optimizer"] = compat.wrapped_optimizer(zero) is optimizer
    facts["device of parameters"] = str(compat.parameter_device(zero))
    for index, group in enumerate(flattened):
        master = compat.master_partition(zero, index)
        assert master.numel() == compat.partition_size(zero, index)
        for parameter, offset in group:
            part = master[offset : offset + parameter.numel()]
            torch.testing.assert_close(part, parameter.detach().flatten(), rtol=0, atol=0)
        module_part = compat.parameter_partition(zero, index)
        assert torch.equal(module_part, master)
        group[0][0].data.fill_(index + 2)
        assert master[group[0][1]] != index + 2
        assert module_part[group[0][1]] == index + 2  # not a copy
        compat.copy_parameters_to_master(zero)
        facts[f"copied {index}"] = compat.master_partition(zero, index)[group[0][1]].item()
        compat.master_partition(zero, index)[group[0][1]] = 9  # not a copy
        facts[f"written {index}"] = compat.master_partition(zero, index)[group[0][1]].item()
        compat.copy_parameters_to_master(zero)
    facts["state"] = optimizer.state_dict()["state"]
    facts["weights"] = {name: value.clone() for name, value in module.state_dict().items()}
    engine.save_checkpoint(str(folder / "saved"), tag="checkpoint", client_state={"epoch": 3})
    torch.distributed.destroy_process_group()  # its threads could end the process otherwise


if __name__ == "__main__":
    main(Path(sys.argv[1]))
