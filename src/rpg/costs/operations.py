"""What a model has to read and to compute, counted; over the measured rates it is the least time a step can take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..kernels import nf4
from ..models.four_bits import packed_weights


@dataclass(frozen=True)
class Ceilings:
    """Measured in the run."""

    flops: float  # a second, of a large product of random matrices
    bytes: float  # a second, read and written, of a copy

    def seconds(self, flops: float, moved: float = 0.0) -> float:
        """The floor: computing and reading can overlap, so the longer of the two."""
        return max(flops / self.flops, moved / self.bytes)


@dataclass(frozen=True)
class Operations:
    """Of one model: weights and layers, and from these the bytes and operations of a step."""

    layers: int
    heads: int
    key_heads: int
    width: int  # of a head
    hidden: int
    vocab: int
    body: int  # weights of the layers' matrices
    element: int = 2  # bytes of a number
    cache: int | None = None  # bytes of a token's keys and values in all layers; None: of as many bytes a number
    packed: int = 0  # weights of the body in 4 bits

    @classmethod
    def of(cls, model: Any, element: int) -> Operations:
        config = model.config.get_text_config()
        ends = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
        heads = config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            heads=heads,
            key_heads=getattr(config, "num_key_value_heads", None) or heads,
            width=getattr(config, "head_dim", None) or config.hidden_size // heads,
            hidden=config.hidden_size,
            vocab=int(model.get_output_embeddings().weight.shape[0]),
            body=sum(p.numel() for p in model.parameters() if p.dim() >= 2 and id(p) not in ends)
            + packed_weights(model),
            element=element,
            packed=packed_weights(model),
        )

    @property
    def head(self) -> int:
        return self.hidden * self.vocab

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.key_heads * self.width * self.element if self.cache is None else self.cache

    def decode_bytes(self, rows: int, held: float) -> float:
        """One step: all weights once, the keys and values of all tokens that are held, the logits written and read."""
        weights = (self.body - self.packed + self.head) * self.element + self.packed * nf4.BYTES
        if rows > nf4.FEW_ROWS:  # made dense, and read again
            weights += 2 * self.packed * self.element
        return weights + held * self.kv_bytes + 2 * rows * self.vocab * self.element

    @property
    def dequantise_bytes(self) -> float:
        """To make all weights that are in 4 bits dense: read, and written."""
        return self.packed * (nf4.BYTES + self.element)

    def decode_flops(self, rows: int, length: float) -> float:
        return 2 * rows * (self.body + self.head) + self._attention(rows * length)

    def decode_seconds(
        self, ceilings: Ceilings, rows: int, prompt: int, sampled: float, groups: int | None = None
    ) -> float:
        """The floor of a step after ``sampled`` tokens; with ``groups`` the prompt of a group is held once."""
        held = (rows if groups is None else groups) * prompt + rows * sampled
        return ceilings.seconds(self.decode_flops(rows, prompt + sampled), self.decode_bytes(rows, held))

    def _attention(self, pairs: float) -> float:
        """Scores and their sum of values, forward, for so many pairs of a token and one that it looks at."""
        return 4 * self.layers * self.heads * self.width * pairs

    def prefill_flops(self, prompts: int, length: int) -> float:
        return 2 * prompts * (length * self.body + self.head) + self._attention(prompts * length * (length + 1) / 2)

    def train_flops(self, groups: int, samples: int, prompt: int, response: int, shared: bool) -> float:
        """Forward and backward, the backward twice the forward; the head once for every response token.

        ``shared``: the prompt of a group once, as it has to be computed; else once for every response. The last token
        of a response predicts nothing and is not read.
        """
        copies, rows, read = groups if shared else groups * samples, groups * samples, response - 1
        tokens = copies * prompt + rows * read
        pairs = copies * prompt * (prompt + 1) / 2 + rows * (read * prompt + read * (read + 1) / 2)
        forward = 2 * tokens * self.body + 2 * rows * response * self.head + self._attention(pairs)
        return 3 * forward


def logp_flops(tokens: int, hidden: int, vocab: int) -> float:
    """Three products: logits, the gradient of the states, the gradient of the head."""
    return 6.0 * tokens * hidden * vocab
