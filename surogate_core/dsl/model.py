"""Model: what a family's plugin defines; trace: Model -> Graph."""

from __future__ import annotations

from typing import Literal

from ..errors import WeightError
from ..ir.graph import STATE, Graph
from ..ir.spec import check
from .layers import Embedding, LMHead
from .module import Module, Stack
from .tensor import Context, Tensor


class Model(Module):
    """A transformer. Assign ``embed``, ``layers``, ``final_norm`` and, where it writes text, ``lm_head``, or override
    `hidden`."""

    embed: Embedding
    layers: Stack
    final_norm: Module
    lm_head: LMHead | None = None

    def hidden(self, tokens: Tensor) -> Tensor:
        """Token ids i32 [T] -> final hidden states [T, dim] that the head reads."""
        return self.final_norm(self.layers(self.embed(tokens)))


def trace(model: Model, output: Literal["loss", "logits", "row_logits", "hidden"], max_positions: int) -> Graph:
    """The forward graph.

    output: "loss" is the weighted sum of token losses (inputs targets, token_weights), with "token_loss" beside it;
    "logits" are those of every token; "row_logits" those of the tokens that input "rows" i32 ["R"] names; "hidden" are the
    final hidden states, which the head would read.
    max_positions: length of the rotary tables, which is the longest document the program can hold. WeightError for
    another output than "hidden" of a model without a head.
    """
    if output != "hidden" and model.lm_head is None:
        raise WeightError("this model has no head that writes text: it makes vectors of texts")
    graph = Graph()
    context = Context(graph, max_positions)
    model.bind(context)
    hidden = model.hidden(context.tokens)
    if output == "loss":
        token_loss = model.lm_head.loss(hidden)
        weights = context.input("token_weights", ("T",), "f32")
        loss = graph.value("loss", (1,), "f32", STATE)
        graph.epilogue.states["loss"] = loss
        context.builder.op("token_sum", token_loss.value, weights.value, inout={"loss": loss})
        graph.outputs = {"loss": loss, "token_loss": token_loss.value}
    elif output == "hidden":
        graph.outputs = {"hidden": hidden.value}
    else:
        if output == "row_logits":
            hidden = context.op("gather_rows", hidden, context.input("rows", ("R",)), label="last_hidden")
        graph.outputs = {"logits": model.lm_head.logits(hidden).value}
    graph.epilogue.carry_out = ()
    return check(graph.record("trace"))
