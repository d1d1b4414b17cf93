"""Asks one library what it sees, and prints the answer as JSON: ``libraries.py verbs``.

A program of its own, with nothing of kvxfer: a driver that hangs or crashes takes only this down.
"""

import ctypes
import json
import os
import sys
from typing import Any

Answer = dict[str, Any]


def _open(names: list[str]) -> tuple[ctypes.CDLL, str]:
    error = ""
    for name in names:
        try:
            return ctypes.CDLL(name), name
        except OSError as failure:
            error = error or str(failure)
    raise LookupError(error)


def _named(variable: str) -> list[str]:
    """Return the library that a user has named, which the core would load too."""
    named = os.environ.get(variable)
    return [named] if named else []


class _DeviceAttr(ctypes.Structure):
    _fields_ = [
        ("fw_ver", ctypes.c_char * 64),
        ("guids", ctypes.c_uint64 * 2),
        ("max_mr_size", ctypes.c_uint64),
        ("page_size_cap", ctypes.c_uint64),
        ("vendor", ctypes.c_uint32 * 3),
        ("max_qp", ctypes.c_int),
        ("max_qp_wr", ctypes.c_int),
        ("flags", ctypes.c_uint),
        ("max_sge", ctypes.c_int),
        ("max_sge_rd", ctypes.c_int),
        ("max_cq", ctypes.c_int),
        ("max_cqe", ctypes.c_int),
        ("max_mr", ctypes.c_int),
        ("max_pd", ctypes.c_int),
        ("unused1", ctypes.c_int * 14),
        ("max_ah", ctypes.c_int),
        ("unused2", ctypes.c_int * 2),
        ("max_srq", ctypes.c_int),
        ("max_srq_wr", ctypes.c_int),
        ("max_srq_sge", ctypes.c_int),
        ("rest", ctypes.c_uint8 * 60),  # a few bytes are used, more do no harm
    ]


class _PortAttr(ctypes.Structure):
    _fields_ = [
        ("state", ctypes.c_uint32),
        ("max_mtu", ctypes.c_uint32),
        ("active_mtu", ctypes.c_uint32),
        ("gid_tbl_len", ctypes.c_int),
        ("port_cap_flags", ctypes.c_uint32),
        ("max_msg_sz", ctypes.c_uint32),
        ("rest", ctypes.c_uint8 * 64),
    ]


def verbs() -> Answer:
    """Return each device's limits."""
    library, name = _open(_named("KVXFER_VERBS_LIBRARY") or ["libibverbs.so.1"])
    for function in ("ibv_get_device_list", "ibv_get_device_name", "ibv_open_device"):
        getattr(library, function).restype = ctypes.c_void_p
    library.ibv_get_device_name.restype = ctypes.c_char_p
    count = ctypes.c_int(0)
    listed = library.ibv_get_device_list(ctypes.byref(count))
    devices: Answer = {}
    for device in ctypes.cast(listed, ctypes.POINTER(ctypes.c_void_p))[: count.value]:
        title = library.ibv_get_device_name(ctypes.c_void_p(device)).decode()
        devices[title] = _verbs_device(library, device)
    if listed:
        library.ibv_free_device_list(ctypes.c_void_p(listed))
    return {
        "library": name,
        "devices": devices,
        "dmabuf": hasattr(library, "ibv_reg_dmabuf_mr"),
    }


def _verbs_device(library: ctypes.CDLL, device: int) -> Answer:
    opened = library.ibv_open_device(ctypes.c_void_p(device))
    if not opened:
        return {"error": "it can't be opened"}
    context = ctypes.c_void_p(opened)
    try:
        found = _DeviceAttr()
        if status := library.ibv_query_device(context, ctypes.byref(found)):
            return {"error": f"ibv_query_device returned {status}"}
        numbers = ("max_mr_size", "max_qp", "max_qp_wr", "max_sge", "max_srq", "max_srq_wr")
        answer: Answer = {name: getattr(found, name) for name in numbers}
        answer["fw_ver"] = found.fw_ver.decode(errors="replace")
        port = _PortAttr()
        if library.ibv_query_port(context, ctypes.c_uint8(1), ctypes.byref(port)) == 0:
            answer["active_mtu"] = 128 << port.active_mtu
            answer["max_msg_sz"] = port.max_msg_sz
        return answer
    finally:
        library.ibv_close_device(context)


def cuda() -> Answer:
    """Return the driver's version and its GPUs."""
    library, name = _open(_named("KVXFER_CUDA_LIBRARY") or ["libcuda.so.1"])
    version, count = ctypes.c_int(0), ctypes.c_int(0)
    if status := library.cuInit(0):
        return {"library": name, "error": f"cuInit returned {status}", "devices": []}
    library.cuDriverGetVersion(ctypes.byref(version))
    library.cuDeviceGetCount(ctypes.byref(count))
    devices = []
    for index in range(count.value):
        device, memory = ctypes.c_int(0), ctypes.c_size_t(0)
        library.cuDeviceGet(ctypes.byref(device), index)
        title, place = ctypes.create_string_buffer(256), ctypes.create_string_buffer(64)
        library.cuDeviceGetName(title, len(title), device)
        library.cuDeviceGetPCIBusId(place, len(place), device)
        library.cuDeviceTotalMem_v2(ctypes.byref(memory), device)

        def attribute(number: int, of: ctypes.c_int = device) -> int:
            value = ctypes.c_int(0)
            library.cuDeviceGetAttribute(ctypes.byref(value), number, of)
            return value.value

        devices.append(
            {
                "name": title.value.decode(errors="replace"),
                "pci": place.value.decode().lower(),
                "memory": memory.value,
                "arch": f"sm_{attribute(75)}{attribute(76)}",
                "rdma": bool(attribute(116)),
                "dmabuf": bool(attribute(124)),
            }
        )
    return {"library": name, "version": version.value, "devices": devices}


def hip() -> Answer:
    """Return the runtime's version and its GPUs."""
    usual = [f"libamdhip64.so.{number}" for number in (7, 6, 5)]
    library, name = _open(_named("KVXFER_HIP_LIBRARY") or usual)
    version, count = ctypes.c_int(0), ctypes.c_int(0)
    library.hipRuntimeGetVersion(ctypes.byref(version))
    status = library.hipGetDeviceCount(ctypes.byref(count))
    devices = []
    for index in range(0 if status else count.value):
        title, place = ctypes.create_string_buffer(256), ctypes.create_string_buffer(64)
        library.hipDeviceGetName(title, len(title), index)
        library.hipDeviceGetPCIBusId(place, len(place), index)
        devices.append(
            {
                "name": title.value.decode(errors="replace"),
                "pci": place.value.decode().lower(),
            }
        )
    answer: Answer = {"library": name, "version": version.value, "devices": devices}
    if status:
        answer["error"] = f"hipGetDeviceCount returned {status}"
    try:
        runtime, _ = _open(["libhsa-runtime64.so.1"])
        answer["dmabuf"] = hasattr(runtime, "hsa_amd_portable_export_dmabuf")
    except LookupError:
        answer["dmabuf"] = False
    return answer


def main() -> None:
    """Answer the question that the command line names."""
    questions = {"verbs": verbs, "cuda": cuda, "hip": hip}
    try:
        answer = questions[sys.argv[1]]()
    except LookupError as error:
        answer = {"missing": str(error.args[0])}
    except AttributeError as error:  # a library without a function that it should have
        answer = {"error": str(error)}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
