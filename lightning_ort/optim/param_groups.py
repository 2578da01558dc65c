"""Weight decay for matrices only (:func:`param_groups`), and look-ups in the parameters of an optimizer."""

from typing import Any

import torch
from torch import nn

from lightning_ort._arguments import check_number, check_type
from lightning_ort._text import PlainTable, rendered

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_NORMS = (
    *(nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.LocalResponseNorm, nn.SyncBatchNorm),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of all groups, in their order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def name_of(module: nn.Module, parameter: torch.Tensor) -> str:
    """Return the name of a parameter in a module, for messages."""
    return next((name for name, other in module.named_parameters() if other is parameter), "a parameter")


def sparse_embedding(module: nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    """Return the name of an embedding with ``sparse=True`` whose weight the optimizer updates, or ``None``."""
    ids = {id(parameter) for parameter in parameters_of(optimizer)}
    for name, submodule in module.named_modules():
        if isinstance(submodule, EMBEDDINGS) and submodule.sparse and id(submodule.weight) in ids:
            return name
    return None


class ParamGroups(list[dict[str, Any]]):
    """Parameter groups for an optimizer. ``str`` returns a table of what they contain."""

    def __str__(self) -> str:
        table = PlainTable("group", "weight decay", "tensors", "elements", "modules", encoding="utf-8")
        for group in self:
            table.add_row(
                group["name"],
                f"{group['weight_decay']:g}",
                str(len(group["params"])),
                f"{sum(parameter.numel() for parameter in group['params']):,}",
                ", ".join(group["modules"]),
            )
        return rendered(table, width=120)


def param_groups(module: nn.Module, weight_decay: float) -> ParamGroups:
    """Split a module's trainable parameters into those with weight decay and those without.

    Matrices and convolution kernels decay. Biases, the parameters of norms and embeddings, and all other parameters
    with fewer than two dimensions do not. The class of the module that owns a parameter decides, not its name. A
    parameter that an embedding shares with another module, such as an output layer, counts as the embedding's.

    Args:
        module: The module that owns the parameters.
        weight_decay: Weight decay of the first group.

    Returns:
        Two groups for any ``torch.optim`` class, or one if the other would be empty. ``print`` shows a summary.

    Raises:
        ValueError: If ``weight_decay`` is negative or not finite, or no parameter is trainable.
        TypeError: If an argument is of another type.

    Example::

        torch.optim.AdamW(lightning_ort.param_groups(self, weight_decay=0.1), lr=3e-4)
    """
    check_type("module", module, nn.Module, "a torch.nn.Module", "param_groups")
    check_number("weight_decay", weight_decay, "param_groups")
    decays: dict[nn.Parameter, bool] = {}
    owners: dict[nn.Parameter, str] = {}
    for submodule in module.modules():
        kind = type(submodule).__name__
        # the name is for norms outside torch: `LlamaRMSNorm` is another implementation of RMSNorm
        plain = isinstance(submodule, (*EMBEDDINGS, *_NORMS)) or "norm" in kind.lower()
        for parameter in submodule.parameters(recurse=False):
            if parameter.requires_grad:
                decays[parameter] = decays.get(parameter, True) and not plain and parameter.dim() > 1
                owners.setdefault(parameter, kind)
    if not decays:
        raise ValueError(f"param_groups: {type(module).__name__} has no parameter that requires a gradient.")
    groups = ParamGroups()
    for name, chosen, decay in (("decay", True, weight_decay), ("no_decay", False, 0.0)):
        parameters = [parameter for parameter, decays_ in decays.items() if decays_ is chosen]
        if parameters:
            modules = list(dict.fromkeys(owners[parameter] for parameter in parameters))
            groups.append({"params": parameters, "weight_decay": decay, "name": name, "modules": modules})
    return groups
