"""Models made of the larger layers of ``torch.nn`` alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.workloads.architectures.base import (
    COMMON_SETTINGS,
    VOCABULARY,
    Architecture,
    Batch,
    Generator,
    projection,
    tokens,
)

FAMILY = "torch_layers"
DIM = 16


class Recurrent(nn.Module):
    """Embedding, a recurrent layer of two, and a head; returns logits and the state."""

    def __init__(self, kind: type[nn.RNNBase], **options: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layers = kind(DIM, DIM, num_layers=2, batch_first=True, dropout=0.1, **options)
        width = DIM * (2 if self.layers.bidirectional else 1)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> tuple[Tensor, object]:
        hidden, state = self.layers(self.embedding(ids))
        return self.head(hidden), state


class Packed(Recurrent):
    """The same over sequences of several lengths, packed."""

    def forward(self, ids: Tensor) -> tuple[Tensor, object]:
        lengths = torch.tensor([ids.shape[1], ids.shape[1] // 2])
        packed = nn.utils.rnn.pack_padded_sequence(self.embedding(ids), lengths, batch_first=True)
        hidden, state = self.layers(packed)
        padded, _ = nn.utils.rnn.pad_packed_sequence(hidden, batch_first=True)
        return self.head(padded), state


class Stepwise(nn.Module):
    """A loop over cells, so that one unit runs many times in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.cell = nn.LSTMCell(DIM, DIM)
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        state = None
        outputs = []
        for step in self.embedding(ids[:, :6]).unbind(1):
            state = self.cell(step, state)
            outputs.append(self.head(state[0]))
        return torch.stack(outputs, 1)


class Attended(nn.Module):
    """Attention layers that return their weights too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(
            nn.MultiheadAttention(DIM, 4, dropout=0.1, batch_first=True) for _ in range(2)
        )
        self.norm = nn.LayerNorm(DIM)

    def forward(self, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        hidden, weights = self.embedding(ids), []
        for layer in self.layers:
            change, weight = layer(hidden, hidden, hidden)
            hidden = hidden + change
            weights.append(weight)
        return self.norm(hidden), weights


class Translator(nn.Module):
    """``nn.Transformer`` with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.transformer = nn.Transformer(DIM, 4, 2, 2, 32, batch_first=True)
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        embedded = self.embedding(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        hidden = self.transformer(embedded, embedded, tgt_mask=mask, tgt_is_causal=True)
        return self.head(hidden)


class Encoder(nn.Module):
    """``nn.TransformerEncoder`` with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM, padding_idx=0)
        layer = nn.TransformerEncoderLayer(DIM, 4, 32, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.encoder(self.embedding(ids), src_key_padding_mask=ids == 0)


class Bags(nn.Module):
    """Embedding bags of several lengths, and a bilinear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.EmbeddingBag(VOCABULARY, DIM, mode="mean")
        self.right = nn.EmbeddingBag(VOCABULARY, DIM, mode="sum")
        self.both = nn.Bilinear(DIM, DIM, DIM)

    def forward(self, ids: Tensor) -> Tensor:
        flat, offsets = ids.flatten(), torch.tensor([0, 5, 11])
        return self.both(self.left(flat, offsets), self.right(flat, offsets))


class Hourglass(nn.Module):
    """Convolutions down and up with group norm, and with instance and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv1d(DIM, 32, 4, stride=2, padding=1), nn.BatchNorm1d(32), nn.PReLU()
        )
        self.up = nn.Sequential(
            nn.ConvTranspose1d(32, DIM, 4, stride=2, padding=1),
            nn.InstanceNorm1d(DIM, affine=True, track_running_stats=True),
            nn.GroupNorm(4, DIM),
        )
        self.embedding = nn.Embedding(VOCABULARY, DIM)

    def forward(self, ids: Tensor) -> Tensor:
        return self.up(self.down(self.embedding(ids).transpose(1, 2)))


def _ids(generator: Generator) -> Batch:
    return {"ids": tokens(generator)}


def _padded(generator: Generator) -> Batch:
    ids = tokens(generator)
    ids[1, -4:] = 0
    return {"ids": ids}


def _model(
    name: str,
    build: Callable[[], nn.Module],
    blocks: tuple[str, ...],
    batch: Callable[[Generator], Batch] = _ids,
) -> Architecture:
    settings = COMMON_SETTINGS
    return Architecture(name, FAMILY, lambda _: build(), batch, projection, blocks, settings)


def architectures() -> list[Architecture]:
    """The family."""
    return [
        _model("lstm", lambda: Recurrent(nn.LSTM), ("LSTM",)),
        _model("lstm_bidirectional", lambda: Recurrent(nn.LSTM, bidirectional=True), ("LSTM",)),
        _model("lstm_packed", lambda: Packed(nn.LSTM), ("LSTM",)),
        _model("lstm_cell", Stepwise, ("LSTMCell", "Linear")),
        _model("gru", lambda: Recurrent(nn.GRU), ("GRU",)),
        _model("multihead_attention", Attended, ("MultiheadAttention",)),
        _model(
            "nn_transformer", Translator, ("TransformerEncoderLayer", "TransformerDecoderLayer")
        ),
        _model("nn_transformer_encoder", Encoder, ("TransformerEncoderLayer",), _padded),
        _model("embedding_bags", Bags, ("EmbeddingBag",)),
        _model("conv_hourglass", Hourglass, ("Sequential",)),
    ]
