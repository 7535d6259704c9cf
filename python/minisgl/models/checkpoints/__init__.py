"""Checkpoints as they are published: which encodings a folder uses, and how each becomes the engine's own weights.

files.py        tensors on disk, read without mapping them         readahead.py   threads that read ahead
base.py         Stored, Encoding: the contract                     placing.py     from stored weights to their places
recognise.py    config.json and tensor names -> weights
converted.py    the engine's own checkpoint

fp8_block.py gptq.py awq.py compressed_tensors.py mxfp4.py gguf.py: an encoding each; integers.py is what four of them share
"""

from minisgl.models.checkpoints.base import Encoding, ExpertChoice, Stored
from minisgl.models.checkpoints.files import Header, read_headers
from minisgl.models.checkpoints.recognise import (
    Checkpoint,
    find_encodings,
    open_checkpoint,
    read_quantization,
    stored_experts,
)

__all__ = [
    "Checkpoint",
    "Encoding",
    "ExpertChoice",
    "Header",
    "Stored",
    "find_encodings",
    "open_checkpoint",
    "read_headers",
    "read_quantization",
    "stored_experts",
]
