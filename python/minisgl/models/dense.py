"""How everything but the experts is stored: --quantize-dense and --embedding-on-host.

On a 12 GB card the dense weights of Qwen3-30B-A3B in bf16, 3.0 GB, are a third of the room that experts could have. fp8 halves
attention and lm_head; the embedding, of which a step reads a few rows, may stay in host memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from minisgl.config import ModelConfig
from minisgl.layers.fp8 import Fp8Storage
from minisgl.models.checkpoints.base import Encoding
from minisgl.models.checkpoints.fp8_block import Fp8Encoding
from minisgl.models.checkpoints.recognise import dense_encodings, open_checkpoint
from minisgl.models.spec import ModelSpec


@dataclass(frozen=True)
class DenseStorage:
    """fp8: of attention projections and lm_head, None for plain numbers. embedding_on_host: pinned, read by the batch's rows.

    A tied lm_head is the embedding and stays plain with it, except where both are asked for: then the lm_head is fp8 on the
    device, and the embedding, in host memory, the same numbers unquantized.
    """

    fp8: Fp8Storage | None = None
    embedding_on_host: bool = False

    @classmethod
    def choose(cls, model: ModelConfig, spec: ModelSpec) -> DenseStorage:
        """What the resolved flags mean for a model. ValueError, with the remedy, for flags that would save nothing."""
        storage = cls.of(model)
        if storage.embedding_on_host and spec.tie_embeddings and storage.fp8 is None:
            raise ValueError(
                "--embedding-on-host saves nothing here: the model's lm_head is its embedding, and every step reads all of it "
                "on the device. Leave it out, or add --quantize-dense fp8, which keeps an fp8 copy for the lm_head"
            )
        return storage

    @classmethod
    def of(cls, model: ModelConfig) -> DenseStorage:
        """What the resolved flags say."""
        fp8 = Fp8Storage(model.quantize_dense_group_size) if model.quantize_dense == "fp8" else None
        return cls(fp8, model.embedding_on_host)

    def shares_head(self, tied: bool) -> bool:
        """Whether the lm_head of a model is its embedding's memory."""
        return tied and not (self.embedding_on_host and self.fp8 is not None)


def stored_group(folder: Path) -> int:
    """Columns that share a scale in a checkpoint whose attention is fp8 in blocks; 0 for scales of rows, and for all others.

    Without weights in the folder config.json alone decides.
    """
    encodings: list[Encoding | None] = list(dense_encodings(folder))
    if not any(isinstance(encoding, Fp8Encoding) for encoding in encodings):
        return 0  # without reading the headers of what may be many files
    if any(folder.glob("*.safetensors")):
        encodings = [w.encoding for w in open_checkpoint(folder).weights if ".self_attn." in w.name]
    blocks = [e.block for e in encodings if isinstance(e, Fp8Encoding) and e.block is not None]
    return blocks[0][1] if blocks else 0
