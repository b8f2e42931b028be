"""Embeddings of a corpus in a small budget: python examples/embed.py.

The corpus is the functions of Python's standard library; the transformer has random weights.
"""

import ast
import logging
import pathlib

import torch
from torch import nn

import autobatch

logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
texts = []
for path in sorted(pathlib.Path(ast.__file__).parent.glob("*.py")):
    source = path.read_text(encoding="utf-8", errors="replace")
    functions = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    texts += ["\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno])[:256] for node in functions]

torch.manual_seed(0)
embedding = nn.Embedding(256, 64)
layer = nn.TransformerEncoderLayer(64, nhead=4, dim_feedforward=128, batch_first=True)
encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)


def embed(piece: list[str]) -> torch.Tensor:
    """One vector a text: the mean over its bytes, padded to the longest of this piece."""
    rows = [torch.tensor(list(text.encode())) for text in piece]
    bytes_, sizes = nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor([len(row) for row in rows])
    padding = torch.arange(bytes_.shape[1]) >= sizes[:, None]
    hidden = encoder(embedding(bytes_), src_key_padding_mask=padding)
    return hidden.masked_fill(padding[..., None], 0).sum(1) / sizes[:, None]


vectors = torch.stack(list(autobatch.map(embed, texts, cut=autobatch.by_length(len), budget="16MiB")))
print(f"{len(texts)} texts, vectors of {vectors.shape[1]}, all finite: {'yes' if vectors.isfinite().all() else 'no'}")
