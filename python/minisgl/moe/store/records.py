"""ExpertRecords: the loading half of a store. All bytes of E experts, filled tensor by tensor.

    part in the record      may arrive as
    gate_up   [2F, ...]     gate, up (one after the other, into the two halves of the first dim) or gate_up
    down      [D, ...]      down
    and likewise gate_up_scale from gate_scale and up_scale, and so on for _zero and _bias

A store for which the records are the slab (resident) and one that copies from them (a cache) load in the same
way.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from minisgl.moe.base import ExpertShape
from minisgl.moe.formats import ExpertFormat
from minisgl.moe.store.base import Guess

CHUNK_WEIGHTS = (
    2**25
)  # weights quantized at a time: 128 MiB in float32, so temporaries stay small beside a layer


class ExpertRecords:
    """records_EB uint8 [E, nbytes] in `format`, with typed views of every part in `parts`."""

    def __init__(
        self,
        num_experts: int,
        shape: ExpertShape,
        weight_format: ExpertFormat,
        device: torch.device | str,
        records_EB: torch.Tensor | None = None,
    ) -> None:
        """Raises ValueError if the format can't store this shape.

        device: where weights are quantized, so that a cache stores the bits that a resident store would. records_EB: memory to
        fill, uint8 [E, nbytes] on any device; allocated on `device` if there is none.
        """
        self.num_experts, self.shape, self.format = num_experts, shape, weight_format
        self.layout = weight_format.layout(shape)
        self._quantize_on = torch.device(device)
        if records_EB is None:
            records_EB = torch.empty((num_experts, self.layout.nbytes), dtype=torch.uint8, device=device)
        assert records_EB.shape == (num_experts, self.layout.nbytes)
        self.records_EB = records_EB
        self.parts = self.layout.views(self.records_EB)
        self._arrived = {
            leaf: torch.zeros(num_experts, dtype=torch.bool) for part in self.parts for leaf in _leaves(part)
        }

    def expect(self, guess: Guess) -> None:
        pass  # fetches nothing early

    def sink(self, expert: int | None, name: str, tensor: torch.Tensor) -> None:
        """See `ExpertStore.sink`."""
        first, tensor_EX = self._batch(expert, tensor)
        expected = self._checkpoint_shape(name)
        self._require(tensor.is_floating_point(), expert, name, "a float tensor", tensor)
        self._require(tensor_EX.shape[1:] == expected, expert, name, f"shape {list(expected)}", tensor)
        if name.endswith("_bias"):
            self._write(first, name, tensor_EX)
            return
        chunk = max(1, CHUNK_WEIGHTS // tensor_EX[0].numel())
        for start in range(0, len(tensor_EX), chunk):
            weights = tensor_EX[start : start + chunk].to(self._quantize_on)
            for part, value in self.format.quantize(name, weights).items():
                self._write(first + start, part, value)

    def sink_parts(self, expert: int | None, parts: Mapping[str, torch.Tensor]) -> None:
        """See `ExpertStore.sink_parts`."""
        for name, tensor in parts.items():
            target = self._target(name)
            first, tensor_EX = self._batch(expert, tensor)
            if name.endswith("_scale") and target.ndim == 2:
                tensor_EX = _channel_scale(tensor_EX, target.shape[1])
            exact = not name.endswith("_bias") and target.dtype != torch.float32  # codes are never converted
            right_dtype = tensor.dtype == target.dtype if exact else tensor.is_floating_point()
            self._require(right_dtype, expert, name, f"dtype {target.dtype}", tensor)
            shape = target.shape[1:]
            self._require(tensor_EX.shape[1:] == shape, expert, name, f"shape {list(shape)}", tensor)
            self._write(first, name, tensor_EX)

    def filled(self, first: int, last: int) -> None:
        """Records first .. last - 1 were written in place, whole."""
        for arrived_E in self._arrived.values():
            arrived_E[first:last] = True

    def fill_random(self, seed: int, std: float = 0.02) -> None:
        """See `ExpertStore.fill_random`."""
        device = self._quantize_on
        generator = torch.Generator(device).manual_seed(seed)
        names = ["gate_up", "down"] + (["gate_up_bias", "down_bias"] if self.shape.bias else [])
        for name in names:
            for expert in range(self.num_experts):
                shape = self._checkpoint_shape(name)
                self.sink(expert, name, torch.randn(shape, generator=generator, device=device) * std)

    def missing(self) -> list[str]:
        """See `ExpertStore.missing`."""
        gaps = []
        for leaf, arrived_E in self._arrived.items():
            absent = (~arrived_E).nonzero().flatten().tolist()
            if len(absent) == self.num_experts:
                gaps.append(f"all experts: {leaf}")
            else:
                gaps += [f"expert {expert}: {leaf}" for expert in absent]
        return gaps

    def weight(self, name: str) -> torch.Tensor:
        """See `ExpertStore.weight`."""
        return self.format.dequantize(name, self.parts)

    def _batch(self, expert: int | None, tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
        """(first expert, tensor with a leading dim of experts)."""
        if expert is None:
            if tensor.ndim == 0 or tensor.shape[0] != self.num_experts:
                raise ValueError(
                    f"expected a leading dim of {self.num_experts} experts in {list(tensor.shape)}"
                )
            return 0, tensor
        if not 0 <= expert < self.num_experts:
            raise ValueError(f"expert {expert} doesn't exist: the layer has 0..{self.num_experts - 1}")
        return expert, tensor[None]

    def _checkpoint_shape(self, name: str) -> tuple[int, ...]:
        hidden, model = self.shape.hidden_dim, self.shape.model_dim
        shapes = {"gate": (hidden, model), "up": (hidden, model), "gate_up": (2 * hidden, model)}
        shapes["down"] = (model, hidden)
        if self.shape.bias:
            shapes |= {f"{stem}_bias": (rows,) for stem, (rows, _) in shapes.items()}
        if name not in shapes:
            raise ValueError(f"experts of this layer have no {name!r}, only {', '.join(shapes)}")
        return shapes[name]

    def _target(self, name: str) -> torch.Tensor:
        """View [E, ...] of the part called `name`, or of the half of gate_up that it is."""
        if name in self.parts:
            return self.parts[name]
        for stem, half in (("gate", 0), ("up", 1)):
            whole = self.parts.get("gate_up" + name.removeprefix(stem))
            if name.startswith(stem) and whole is not None:
                return whole.chunk(2, dim=1)[half]
        raise ValueError(f"{self.format.name} experts have no part {name!r}, only {', '.join(self._arrived)}")

    def _write(self, first: int, name: str, value_EX: torch.Tensor) -> None:
        last = first + len(value_EX)
        self._target(name)[first:last].copy_(value_EX)
        for leaf in _leaves(name):
            self._arrived[leaf][first:last] = True

    def _require(self, ok: bool, expert: int | None, name: str, expected: str, found: torch.Tensor) -> None:
        if not ok:
            where = "all experts" if expert is None else f"expert {expert}"
            lead = f" after a leading {self.num_experts}" if expert is None else ""
            raise ValueError(
                f"{where}, {name!r}: expected {expected}{lead}, found {found.dtype} {list(found.shape)}"
            )


def _leaves(name: str) -> list[str]:
    """The smallest pieces in which a part may arrive: gate_up_scale -> gate_scale, up_scale."""
    if name.startswith("gate_up"):
        suffix = name.removeprefix("gate_up")
        return [f"gate{suffix}", f"up{suffix}"]
    return [name]


def _channel_scale(scale: torch.Tensor, num_rows: int) -> torch.Tensor:
    """[E], [E, 1], [E, N] or [E, N, 1] -> [E, N]; anything else is left for the shape check to refuse."""
    if scale.ndim == 3 and scale.shape[2] == 1:
        scale = scale.squeeze(2)
    if scale.ndim == 1:
        scale = scale[:, None]
    return scale.expand(-1, num_rows) if scale.shape[1:] == (1,) else scale
