"""Ranges of modules: around the methods that launch kernels, and within one another."""

import ast

import torch
from torch import nn

from tests.helpers.source import ROOT, parse
from workers.graphs.trace_ranges import _ENTRIES, add_module_ranges, current_module


def test_every_entry_is_a_method_of_a_layer() -> None:
    """A method that has another name now would launch kernels without a range."""
    layers = [path.relative_to(ROOT) for path in (ROOT / "workers" / "layers").rglob("*.py")]
    methods = {
        node.name for path in layers for node in ast.walk(parse(path)) if isinstance(node, ast.FunctionDef)
    }
    assert set(_ENTRIES) <= methods


class Inner(nn.Module):
    def forward(self, seen: list[str]) -> None:
        seen.append(current_module())


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Inner(), Inner()])

    def forward(self, seen: list[str]) -> None:
        for layer in self.layers:
            layer(seen)
        seen.append(current_module())
        raise RuntimeError


def test_the_innermost_module_is_the_current_one_also_after_an_error() -> None:
    model = nn.Sequential()
    model.add_module("model", Outer())
    add_module_ranges(model)
    seen: list[str] = []
    with torch.inference_mode():
        try:
            model.get_submodule("model")(seen)
        except RuntimeError:
            seen.append(current_module())
    assert seen == ["model.layers.0", "model.layers.1", "model", ""]
