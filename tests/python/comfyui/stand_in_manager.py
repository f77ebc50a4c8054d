"""A model manager that does to a guest what ComfyUI 0.33's was seen to do, and notes which
members it reads.

Written from the list of what was seen, not from ComfyUI's source. It holds weak references only,
lists by identity and ``is_clone``, forgets what nobody holds, keeps by
``detach(unpatch_all=False)``, unloads by ``detach``, frees a device until enough of it is free,
those first of which least is loaded, and lets an exception of a guest end the thread that prompts
run on.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Sequence
from typing import Any, Callable

import torch

#: What the manager reads of a guest.
MEMBERS = {
    "load_device", "offload_device", "parent", "model", "model_size", "loaded_size", "current_loaded_device", "model_dtype",
    "model_patches_to", "model_patches_models", "is_dynamic", "is_clone", "partially_load", "partially_unload", "detach",
    "clone_base_uuid", "get_nested_additional_models", "lowvram_patch_counter",
}  # fmt: skip


class OutOfMemory(RuntimeError):
    pass


class Interrupted(BaseException):
    pass


class Seen:
    """A guest, of which only the members above can be read."""

    def __init__(self, guest: Any) -> None:
        self._guest = weakref.ref(guest)

    def __getattr__(self, name: str) -> Any:
        assert name in MEMBERS, f"the manager does not read {name}"
        return getattr(self._guest(), name)

    @property
    def gone(self) -> bool:
        return self._guest() is None

    def is_guest(self, guest: Any) -> bool:
        return self._guest() is guest


class Listed:
    def __init__(self, guest: Any) -> None:
        self.guest = Seen(guest)
        self.device = self.guest.load_device
        self.real_model: weakref.ref[Any] | None = None

    @property
    def model(self) -> Any:
        return self.guest._guest()


class Manager:
    """``free`` are bytes of each device that nobody uses, without the guests. Installed as
    ``comfy.model_management``."""

    def __init__(self, *devices: torch.device, free: Callable[[torch.device], int] = lambda device: 0) -> None:
        self.devices = devices or (torch.device("cpu"),)
        self.free = free
        self.disable_smart_memory = False
        self.interrupted = False
        self.listed: list[Listed] = []
        self.freed: list[tuple[int, torch.device]] = []  # asked for by guests
        self.thread_lives = True

    def install(self) -> None:
        module = types.ModuleType("comfy.model_management")
        module.__dict__.update(
            OOM_EXCEPTION=OutOfMemory, InterruptProcessingException=Interrupted, get_torch_device=lambda: self.devices[0],
            get_all_torch_devices=lambda: list(self.devices), load_models_gpu=self.load, free_memory=self.asked_to_free,
            unload_all_models=self.unload_all, current_loaded_models=self.listed, extra_reserved_memory=lambda: 0, processing_interrupted=lambda: self.interrupted,
            throw_exception_if_processing_interrupted=self.throw_if_interrupted,
        )  # fmt: skip
        package = types.ModuleType("comfy")
        package.__dict__.update(model_management=module, __path__=[])
        sys.modules.update({"comfy": package, "comfy.model_management": module})

    def throw_if_interrupted(self) -> None:
        if self.interrupted:
            self.interrupted = False
            raise Interrupted

    # --- what nodes call

    def load(self, guests: list[Any], memory_required: int = 0) -> None:
        chosen = []
        for guest in guests:
            assert not Seen(guest).model_patches_models()
            chosen.append(next((one for one in self.listed if one.guest.is_guest(guest)), None) or Listed(guest))
        for one in chosen:
            for other in [other for other in self.listed if one.guest.is_clone(other.guest._guest())]:
                self.listed.remove(other)
                other.guest.detach(unpatch_all=False)
        for one in chosen:
            if one.device.type != "cpu":
                missing = one.guest.model_size() if one.guest.current_loaded_device() != one.device else 0
                self.free_memory(missing + memory_required, one.device, for_dynamic=one.guest.is_dynamic())
        for one in chosen:
            one.guest.model_patches_to(one.device)
            one.guest.model_patches_to(one.guest.model_dtype())
            one.guest.partially_load(one.device, 1e32, force_patch_weights=False)
            one.guest.lowvram_patch_counter()
            one.real_model = weakref.ref(one.guest.model, lambda _, one=one: self._forget(one))
            hash(one.real_model())
            self.listed.insert(0, one)

    def asked_to_free(self, memory: int, device: torch.device, keep_loaded: Sequence[Listed] = ()) -> None:
        self.freed.append((memory, device))
        self.free_memory(memory, device, keep_loaded)

    def free_memory(self, memory: float, device: torch.device, keep_loaded: Sequence[Listed] = (), for_dynamic: bool = False) -> None:
        found = [one for one in self.listed if one.device == device and one not in keep_loaded and not one.guest.gone]
        sizes = {id(one): (one.guest.model_size() - one.guest.loaded_size(), one.guest.model_size()) for one in found}
        for one in sorted(found, key=lambda one: (-sizes[id(one)][0], sizes[id(one)][1])):
            missing = 1e32 if self.disable_smart_memory else memory - self.free_of(device)
            if missing > 0 and self._unload(one, missing):
                self.listed.remove(one)

    def _unload(self, one: Listed, missing: float) -> bool:
        if missing < one.guest.loaded_size() and one.guest.partially_unload(one.guest.offload_device, missing) >= missing:
            return False
        one.guest.detach(True)
        assert one.real_model is not None and one.real_model() is not None, "the model died in detach"
        one.real_model = None
        return True

    def _forget(self, one: Listed) -> None:
        if one in self.listed:
            self.listed.remove(one)

    def free_of(self, device: torch.device) -> int:
        return self.free(device)

    # --- what a user does

    def unload_all(self) -> None:
        for device in self.devices:
            self.free_memory(1e30, device)

    def press_free(self) -> None:
        """The button, on the thread that prompts run on."""
        self.on_prompt_thread(self.unload_all)

    def on_prompt_thread(self, work: Callable[[], Any]) -> None:
        assert self.thread_lives, "the prompt thread has ended: this prompt waits for ever"
        try:
            work()
        except Exception:
            self.thread_lives = False
            raise

    def names(self) -> list[str]:
        return [one.guest._guest().name for one in self.listed]
