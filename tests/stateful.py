"""Functions that keep what they see, in every way that Python and torch offer, and a model of one layer for them."""

from typing import Any

import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import hookline


def tiny_llama() -> hookline.HookedModel:
    """A model of one layer, because a graph takes seconds."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, head_dim=24, vocab_size=64, pad_token_id=0, eos_token_id=None)
    return hookline.hook(LlamaForCausalLM(config).eval())


def negate(_module: Any, args: Any, output: Any = None) -> Any:
    """A torch hook, before or after a module."""
    if output is None:
        return (-args[0], *args[1:])
    return -output if isinstance(output, torch.Tensor) else (-output[0], *output[1:])


class State:
    """Where functions keep what they see."""

    def __init__(self) -> None:
        self.total, self.rows, self.calls = torch.zeros(()), torch.zeros(16, 32), []
        self.holder = type("Holder", (), {"total": torch.zeros(()), "calls": []})
        self.mean, self.var = torch.zeros(32), torch.ones(32)

    def functions(self) -> dict[str, Any]:
        """A function for each way to keep something."""
        total, rows, holder, mean, var = self.total, self.rows, self.holder, self.mean, self.var

        def adds(x):
            total.add_(1)

        def writes_at(x):
            rows[x.shape[1]] += x[0, -1]

        def of_class(x):
            holder.total += 1

        def of_class_in_place(x):
            holder.total.add_(1)

        def lists_of_class(x):
            holder.calls.append(1)

        def helper(x):
            return x * 2

        helper.calls = self.calls

        def of_function(x):
            helper.calls.append(1)
            return helper(x)

        def alias(x):
            count = total
            count += 1

        def out(x):
            torch.add(total, 1, out=total)

        def data(x):
            total.data.add_(1)

        def many(x):
            torch._foreach_add_([total, rows], 1)

        def view(x):
            rows.view(-1)[3:4].mul_(1).add_(x.sum())

        def typed(x):
            total.type_as(x).add_(1)

        def statistics(x):
            F.batch_norm(x.flatten(0, 1), mean, var, training=True)

        functions = [adds, writes_at, of_class, of_class_in_place, lists_of_class, of_function, alias]
        functions += [out, data, many, view, typed, statistics]
        return {function.__name__: function for function in functions}

    def seen(self) -> list[torch.Tensor]:
        """All that was kept."""
        numbers = [self.total, self.rows, self.holder.total, self.mean, self.var]
        return [*numbers, torch.tensor([len(self.calls), len(self.holder.calls)])]


def stopping(model, ids):
    """Options with which a generation stops in the middle of a block of steps."""
    free = model.generate(ids, max_new_tokens=12, do_sample=False)
    return {"max_new_tokens": 24, "do_sample": False, "eos_token_id": [int(row[9]) for row in free]}
