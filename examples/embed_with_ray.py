"""Embed the functions of Python's library with Ray Data and random weights: python examples/embed_with_ray.py."""

import ast
import pathlib

import numpy as np
import ray
import torch
from torch import nn

import autobatch


class Embedder:
    """An actor: whatever block Ray hands it is run in pieces that fit its memory."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.embedding, self.recurrent = nn.Embedding(256, 64), nn.GRU(64, 128, batch_first=True)

    def embed(self, piece: list[bytes]) -> torch.Tensor:
        """One vector a text: the last state over its bytes."""
        rows = [self.embedding(torch.tensor(list(text))) for text in piece]
        return self.recurrent(nn.utils.rnn.pack_sequence(rows, enforce_sorted=False))[1][0]

    def __call__(self, block: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What Ray calls with each block."""
        texts = [text.encode() for text in block["item"]]
        vectors = autobatch.map(self.embed, texts, cut=autobatch.by_length(len), budget="16MiB")
        return {"vector": torch.stack(list(vectors)).numpy()}


modules = [ast.parse(path.read_bytes()) for path in pathlib.Path(ast.__file__).parent.glob("*.py")]
found = [node for module in modules for node in module.body if isinstance(node, ast.FunctionDef)]
ray.init(include_dashboard=False, num_cpus=2)
data = ray.data.from_items([ast.unparse(node)[:256] for node in found], override_num_blocks=4)
rows = data.map_batches(Embedder, batch_size=None, concurrency=1).take_all()
print(f"{len(rows)} of {len(found)} vectors, all finite: {all(np.isfinite(row['vector']).all() for row in rows)}")
