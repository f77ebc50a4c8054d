"""What ComfyUI's model management holds of a model: an object with the members of a ModelPatcher
that it reads.

It counts the memory that the daemon measures, and its ``detach`` unloads the model in the
daemon. It never raises: an exception here ends ComfyUI's prompt thread, and every later prompt
would wait for ever.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from typing import Any


class BulkheadModel:
    """Stands for the weights: ComfyUI keeps a weak reference to it, and its class's name is
    what ComfyUI logs."""


class Patcher:
    parent = None  # of a clone: the patcher that it was made from

    def __init__(self, name: str, device: Any, size_now: Callable[[], int], size_expected: Callable[[], int],
                 unload: Callable[[], None]) -> None:  # fmt: skip
        """``size_now``: bytes of its processes, 0 without one. ``unload`` returns when the
        memory is back."""
        import torch

        self.name = name
        self.model = BulkheadModel()
        self.load_device = device
        self.offload_device = torch.device("cpu")
        self.clone_base_uuid = uuid.uuid4()
        self._size_now, self._size_expected, self._unload = size_now, size_expected, unload
        self._size = 0

    def assume(self, size: int) -> None:
        """``loaded_size`` is this while ``size_now`` fails."""
        self._size = size

    def loaded_size(self) -> int:
        self._size = self._guarded(self._size_now, self._size)
        return self._size

    def model_size(self) -> int:
        return self.loaded_size() or self._guarded(self._size_expected, 0)

    def _guarded(self, size: Callable[[], int], otherwise: int) -> int:
        try:
            return size()
        except Exception as error:
            logging.warning("Bulkhead: the size of %s is not known, %d bytes are assumed: %s", self.name, otherwise, error)
            return otherwise

    def current_loaded_device(self) -> Any:
        return self.load_device if self.loaded_size() > 0 else self.offload_device

    def detach(self, unpatch_all: bool = True) -> BulkheadModel:
        """ComfyUI lists a model again by ``detach(unpatch_all=False)``: then it stays."""
        if unpatch_all:
            try:
                self._unload()
            except Exception as error:
                logging.error("Bulkhead: %s was not unloaded: %s", self.name, error)
        return self.model

    def partially_load(self, device_to: Any, extra_memory: float = 0, force_patch_weights: bool = False) -> int:
        """Returns the bytes added: none, since the daemon has loaded all of it."""
        return 0

    def partially_unload(self, device_to: Any, memory_to_free: float = 0, force_patch_weights: bool = False) -> int:
        """Returns the bytes freed: none, since a process cannot be unloaded in part. ComfyUI then
        calls ``detach``."""
        return 0

    def model_patches_to(self, device_or_dtype: Any) -> None:
        pass

    def model_dtype(self) -> None:
        return None

    def model_patches_models(self) -> list[Any]:
        return []

    def get_nested_additional_models(self) -> list[Any]:
        return []

    def lowvram_patch_counter(self) -> int:
        return 0

    def is_dynamic(self) -> bool:
        return False

    def is_clone(self, other: Any) -> bool:
        return other is self
