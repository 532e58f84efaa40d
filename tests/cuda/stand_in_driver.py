"""The CUDA driver's library in Python, with the C types of its header."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

OUT_OF_MEMORY, INVALID_CONTEXT, INVALID_VALUE = 2, 201, 1
ALREADY_REGISTERED, NOT_REGISTERED = 712, 713
NAMES = {
    OUT_OF_MEMORY: b"CUDA_ERROR_OUT_OF_MEMORY",
    INVALID_CONTEXT: b"CUDA_ERROR_INVALID_CONTEXT",
    INVALID_VALUE: b"CUDA_ERROR_INVALID_VALUE",
    ALREADY_REGISTERED: b"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
    NOT_REGISTERED: b"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
}
CONTEXT = 0xC0
DEFAULT_STREAM = 0

_C: dict[str, tuple[Any, ...]] = {
    "cuInit": ("_init", ctypes.c_uint),
    "cuDeviceGet": ("_device_get", ctypes.c_void_p, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": ("_device_primary_ctx_retain", ctypes.c_void_p, ctypes.c_int),
    "cuCtxSetCurrent": ("_ctx_set_current", ctypes.c_void_p),
    "cuDeviceGetAttribute": ("_device_get_attribute", ctypes.c_void_p, ctypes.c_int, ctypes.c_int),
    "cuMemHostRegister_v2": ("_mem_host_register", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint),
    "cuMemHostUnregister": ("_mem_host_unregister", ctypes.c_void_p),
    "cuMemcpyBatchAsync": (
        "_memcpy_batch_async",
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
        *(ctypes.c_void_p, ctypes.c_void_p),
    ),
    "cuGetErrorName": ("_get_error_name", ctypes.c_int, ctypes.c_void_p),
}


class StandInLibrary:
    """Executes what it is asked for, in host memory. `failures`: call -> its numbers -> status."""

    def __init__(self, failures: Mapping[str, Mapping[int, int]] | None = None) -> None:
        self.registered: dict[int, int] = {}
        """Bytes by address."""
        self.calls: Counter[str] = Counter()
        self.can_use_host_pointers = True
        self.orders: list[int] = []
        """`srcAccessOrder` of each batch."""
        self.on_register: Callable[[], object] = lambda: None
        self._failures = failures or {}
        self._context = threading.local()
        self._lock = threading.Lock()
        for name, (method, *types) in _C.items():
            c_function = ctypes.CFUNCTYPE(ctypes.c_int, *types)
            setattr(self, name, c_function(self._counted(name, getattr(self, method))))

    def _counted(self, name: str, call: Callable[..., int]) -> Callable[..., int]:
        def counted(*arguments: Any) -> int:
            with self._lock:
                number = self.calls[name]
                self.calls[name] += 1
            return self._failures.get(name, {}).get(number) or call(*arguments)

        return counted

    def _init(self, flags: int) -> int:
        return 0

    def _device_get(self, device: int, ordinal: int) -> int:
        ctypes.c_int.from_address(device).value = ordinal
        return 0

    def _device_primary_ctx_retain(self, context: int, device: int) -> int:
        ctypes.c_void_p.from_address(context).value = CONTEXT + device
        return 0

    def _ctx_set_current(self, context: int) -> int:
        self._context.value = context
        return 0

    def _device_get_attribute(self, value: int, attribute: int, device: int) -> int:
        if attribute != 91:  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
            return INVALID_VALUE
        ctypes.c_int.from_address(value).value = int(self.can_use_host_pointers)
        return 0

    def _mem_host_register(self, address: int, size: int, flags: int) -> int:
        if not hasattr(self._context, "value"):
            return INVALID_CONTEXT
        self.on_register()
        with self._lock:
            for start, length in self.registered.items():
                if address < start + length and start < address + size:
                    return ALREADY_REGISTERED
            self.registered[address] = size
        return 0

    def _mem_host_unregister(self, address: int) -> int:
        with self._lock:
            return 0 if self.registered.pop(address, None) else NOT_REGISTERED

    def _memcpy_batch_async(
        self,
        targets: int,
        sources: int,
        sizes: int,
        count: int,
        attributes: int,
        first_copies: int,
        num_attributes: int,
        failed: int,
        stream: int | None,
    ) -> int:
        if not stream or not count or num_attributes != 1:
            return INVALID_VALUE
        if ctypes.c_size_t.from_address(first_copies).value:
            return INVALID_VALUE
        order, *hints_and_flags = (ctypes.c_int * 6).from_address(attributes)
        if order not in (1, 2, 3) or any(hints_and_flags):
            return INVALID_VALUE
        self.orders.append(order)
        columns = [(ctypes.c_size_t * count).from_address(x) for x in (targets, sources, sizes)]
        for target, source, size in zip(*columns, strict=True):
            if any(self._is_cut(x, size) for x in (target, source)):
                return INVALID_VALUE
            ctypes.memmove(target, source, size)
        return 0

    def _is_cut(self, address: int, size: int) -> bool:
        """Return whether some but not all of the bytes are in one registered piece."""
        for start, length in self.registered.items():
            overlap = min(address + size, start + length) - max(address, start)
            if 0 < overlap < size:
                return True
        return False

    def _get_error_name(self, status: int, text: int) -> int:
        ctypes.c_char_p.from_address(text).value = NAMES[status]
        return 0
