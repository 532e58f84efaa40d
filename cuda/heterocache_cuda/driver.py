"""The calls of the CUDA driver that torch does not offer.

They go to the driver's library itself. Unlike the runtime library it keeps no error until it is
asked for, so a call that failed leaves nothing that a later kernel launch would report.
"""

from __future__ import annotations

import ctypes
from typing import Any

from heterocache_cuda.mover import Int64Array

_LIBRARY = "libcuda.so.1"
_PORTABLE, _DEVICE_MAP = 1, 2
_CAN_USE_HOST_POINTER = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
_IN_STREAM_ORDER, _IN_ANY_ORDER = 1, 3


class CudaError(RuntimeError):
    """The driver, or the device, cannot do what was asked."""


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes. Locations are hints for managed memory only."""

    _fields_ = [
        ("source_access_order", ctypes.c_int),
        ("source_location", _Location),
        ("target_location", _Location),
        ("flags", ctypes.c_uint),
    ]


class Driver:
    """The driver's calls for one device, from any thread."""

    def __init__(self, library: Any, device: ctypes.c_int, context: ctypes.c_void_p) -> None:
        self._library = library
        self._device = device
        self._context = context

    @classmethod
    def open(cls, device_index: int, library: Any = None) -> Driver:
        """Open the driver for one of the devices that this process sees.

        `library`: a stand-in. Raises CudaError, and OSError where there is no driver.
        """
        library = ctypes.CDLL(_LIBRARY) if library is None else library
        device, context = ctypes.c_int(), ctypes.c_void_p()
        _call(library, "cuInit", ctypes.c_uint(0))
        _call(library, "cuDeviceGet", ctypes.byref(device), ctypes.c_int(device_index))
        # The context that torch uses too. It lives as long as the process.
        _call(library, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        return cls(library, device, context)

    @property
    def can_use_host_pointers(self) -> bool:
        """Return whether the device reads registered memory at the host's own addresses."""
        value = ctypes.c_int()
        attribute = ctypes.c_int(_CAN_USE_HOST_POINTER)
        _call(self._library, "cuDeviceGetAttribute", ctypes.byref(value), attribute, self._device)
        return bool(value.value)

    @property
    def can_copy_batches(self) -> bool:
        """Return whether there is `copy_batch`: since the driver of CUDA 12.8."""
        return hasattr(self._library, "cuMemcpyBatchAsync")

    def register(self, address: int, size_bytes: int) -> None:
        """Page-lock host memory for all devices and map it. Raises CudaError."""
        # Else a new thread has no context, and one on device 0 would take memory there.
        _call(self._library, "cuCtxSetCurrent", self._context)
        flags = ctypes.c_uint(_PORTABLE | _DEVICE_MAP)
        where, size = ctypes.c_void_p(address), ctypes.c_size_t(size_bytes)
        _call(self._library, "cuMemHostRegister_v2", where, size, flags)

    def unregister(self, address: int) -> None:
        """Unlock what was registered at this address. Raises CudaError."""
        _call(self._library, "cuCtxSetCurrent", self._context)
        _call(self._library, "cuMemHostUnregister", ctypes.c_void_p(address))

    def copy_batch(
        self,
        targets: Int64Array,
        sources: Int64Array,
        sizes: Int64Array,
        stream: int,
        *,
        is_source_stable: bool,
    ) -> None:
        """Order copies of `[n]` addresses and bytes on a stream, not the default one.

        They run in any order among themselves. `is_source_stable`: nothing in the stream writes
        the sources, so they may be read early. Raises CudaError.
        """
        if not len(sizes):
            return
        order = _IN_ANY_ORDER if is_source_stable else _IN_STREAM_ORDER
        first_copy, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        # This name is the call's first form, which CUDA 13's headers call _v2 without `failed`.
        _call(
            self._library,
            "cuMemcpyBatchAsync",
            *(ctypes.c_void_p(x.ctypes.data) for x in (targets, sources, sizes)),
            ctypes.c_size_t(len(sizes)),
            ctypes.byref(_CopyAttributes(source_access_order=order)),
            ctypes.byref(first_copy),
            ctypes.c_size_t(1),
            ctypes.byref(failed),
            ctypes.c_void_p(stream),
        )


def _call(library: Any, name: str, *arguments: Any) -> None:
    status = int(getattr(library, name)(*arguments))
    if status:
        text = ctypes.c_char_p()
        library.cuGetErrorName(ctypes.c_int(status), ctypes.byref(text))
        error = (text.value or b"an unknown error").decode()
        raise CudaError(f"{name} failed with {error} ({status})")
