"""``lightning-ort memory``: memory that training a module needs with each implementation of the optimizer."""

import sys
from argparse import ArgumentParser, Namespace

import torch
from rich.filesize import decimal
from torch import nn

from lightning_ort._text import PlainTable, console, say
from lightning_ort.cli.arguments import add_mapping, add_switch
from lightning_ort.cli.load import call, load
from lightning_ort.optim.memory import STATES, Memory, predict
from lightning_ort.optim.memory import measure as measure_memory


def add_arguments(parser: ArgumentParser) -> None:
    """Add what :func:`memory` takes."""
    add = parser.add_argument
    add("module", help="class or function that creates it, as package.module:name or path/to/file.py:name")
    add_mapping(parser, "--args", "keyword arguments for the module")
    names = "implementations of the optimizer, as in ORTStrategy(optim=...); by default, all of them"
    add("--optim", nargs="+", help=names)
    add("--ranks", type=int, nargs="+", help="numbers of processes to show ZeRO stage 1 for")
    add_switch(
        parser, "--measure", "create the module on the CPU, run a step with each optimizer and show what was allocated"
    )


def memory(given: Namespace) -> None:
    """Show the bytes of parameters, gradients and optimizer states.

    The module is created on the meta device, so a model of any size fits.
    """
    module, ranks, names = given.module, given.ranks or (), given.optim or list(STATES)
    for count in ranks:
        if count < 1:
            sys.exit(f"--ranks {count}: must be at least 1.")
    make = load(module, "module")
    with torch.device("cpu" if given.measure else "meta"):
        made = call(make, module, given.args or {})
    if not isinstance(made, nn.Module):
        sys.exit(f"{module} returned a {type(made).__name__}: name a class or function that creates a torch.nn.Module.")
    table = PlainTable("optimizer", title=f"{module}: {sum(p.numel() for p in made.parameters()):,} parameters")
    headers = ["states", "per element", "in all"]
    headers += ["measured"] if given.measure else []
    headers += [f"each of {count} ranks" for count in ranks]
    for header in headers:
        longest = max(map(len, header.split()))  # a word of a header is never broken, nor is a number of bytes
        table.add_column(header, justify="right", min_width=max(len("99.9 kB"), longest))
    table.columns[0].no_wrap = True
    table.box, table.pad_edge, table.padding = None, False, (0, 1, 0, 0)
    for name in names:
        try:
            predicted = predict(made, name)
        except ValueError as error:
            sys.exit(str(error))
        row = [decimal(predicted.states), f"{predicted.states_per_element:.2f} B", decimal(predicted.per_rank(1))]
        if given.measure:
            row.append(_measured(made, name))
        table.add_row(name, *row, *(decimal(predicted.per_rank(count)) for count in ranks))
    out = console()
    out.print(table)
    say("in all: states, parameters and gradients")
    if {"auto", "keep"} & set(names):
        say("auto and keep: where configure_optimizers returns torch's AdamW.")
    if any(name.endswith("bit") for name in names):
        say("8-bit and 4-bit: tensors of fewer than 4,096 elements, and bitsandbytes' embeddings, keep 32-bit states.")
    if ranks:
        say("Ranks are those of ZeRO stage 1, which splits the states alone.")


def _measured(module: nn.Module, name: str) -> str:
    try:
        found: Memory = measure_memory(module, name)
    except (ModuleNotFoundError, ValueError) as error:
        return str(error)
    return decimal(found.states)
