"""Weight decay for matrices only: :func:`param_groups`."""

from typing import Any

from torch import nn

from lightning_ort._arguments import check_number, check_type
from lightning_ort._text import PlainTable, rendered
from lightning_ort.optim.swap import EMBEDDINGS


class ParamGroups(list[dict[str, Any]]):
    """Parameter groups for an optimizer; as a string, a table of what is in them."""

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

    Matrices and convolution kernels decay. Biases, the parameters of norms and embeddings do not; nor does any other
    parameter with fewer than two dimensions. The kind of the module that owns a parameter decides, not its name. A
    parameter that an embedding shares with another module, such as an output layer, counts as the embedding's.

    Args:
        module: Whose parameters.
        weight_decay: For the first group.

    Returns:
        Two groups for any ``torch.optim`` class, fewer where one would be empty; ``print`` shows a summary.

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
        plain = isinstance(submodule, EMBEDDINGS) or _is_norm(submodule)
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


def _is_norm(module: nn.Module) -> bool:
    # torch's classes, and others' after their kind: `LlamaRMSNorm` is torch's RMSNorm written again
    norms = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.LocalResponseNorm, nn.modules.batchnorm._NormBase)
    return isinstance(module, norms) or "norm" in type(module).__name__.lower()
