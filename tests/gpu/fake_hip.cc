// The entry points of libamdhip64 and libhsa-runtime64 that are used, over FakeGpus.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "gpu/fake_gpu.h"

#define FAKE extern "C" __attribute__((visibility("default")))

using kvxfer::fake::FakeGpus;
using kvxfer::fake::Problem;

namespace {

// Where in the memory behind a dmabuf its allocation begins: an allocator that cuts up larger ones.
constexpr size_t kDmaBufOffset = 2 << 20;

uint32_t hdp_flush_register = 0;

FakeGpus& gpus() { return FakeGpus::instance(); }

int code(Problem problem) {
  switch (problem) {
    case Problem::kNone: return 0;
    case Problem::kInvalidValue: return 1;
    case Problem::kOutOfMemory: return 2;
    case Problem::kInvalidContext: return 101;
    case Problem::kInvalidHandle: return 400;
    case Problem::kNotFound: return 209;
    case Problem::kNotReady: return 600;
    case Problem::kLost: return 719;
    case Problem::kCaptureUnsupported: return 900;
    case Problem::kCaptureInvalidated: return 901;
    case Problem::kAlreadyMapped: return 208;
  }
  return 999;
}

template <class Work>
int call(const char* name, Work work) {
  if (FakeGpus::current().empty()) FakeGpus::current().push_back(0);  // HIP begins with device 0
  const Problem problem = gpus().enter(name);
  return code(problem != Problem::kNone ? problem : work());
}

}  // namespace

FAKE int hipInit(unsigned) {
  return call("hipInit", [] { return Problem::kNone; });
}
FAKE int hipRuntimeGetVersion(int* version) {
  *version = std::getenv("FAKE_HIP_VERSION") != nullptr ? std::atoi(std::getenv("FAKE_HIP_VERSION"))
                                                        : 70051831;
  return 0;
}
FAKE const char* hipGetErrorName(int result) {
  return result == 2 ? "hipErrorOutOfMemory" : "hipErrorFake";
}
FAKE const char* hipGetErrorString(int result) {
  return result == 2 ? "out of memory" : "made up for a test";
}
FAKE int hipGetLastError() { return 0; }
FAKE int hipGetDeviceCount(int* count) {
  *count = gpus().count();
  return *count > 0 ? 0 : 100;
}
FAKE int hipGetDevice(int* device) {
  return call("hipGetDevice", [&] {
    *device = FakeGpus::current().back();
    return Problem::kNone;
  });
}
FAKE int hipSetDevice(int device) {
  return call("hipSetDevice", [&] {
    if (device < 0 || device >= gpus().count()) return Problem::kInvalidContext;
    FakeGpus::current().back() = device;
    return Problem::kNone;
  });
}
FAKE int hipDeviceGetPCIBusId(char* text, int bytes, int device) {
  std::snprintf(text, static_cast<size_t>(bytes), "0000:%02x:00.0", 0xc1 + device);
  return 0;
}
FAKE int hipPointerGetAttribute(void* data, int attribute, void* address) {
  return call("hipPointerGetAttribute", [&] {
    const auto memory = gpus().find(reinterpret_cast<uintptr_t>(address));
    if (!memory) return Problem::kInvalidValue;
    int version = 0;
    hipRuntimeGetVersion(&version);
    const bool device = memory->kind == FakeGpus::Kind::kDevice;
    switch (attribute) {
      case 2:
        *static_cast<unsigned*>(data) = (device ? 1u : 0u) + (version >= 60000000 ? 1u : 0u);
        return Problem::kNone;
      case 8: *static_cast<bool*>(data) = false; return Problem::kNone;
      case 9: *static_cast<int*>(data) = memory->device; return Problem::kNone;
      case 11: *static_cast<uintptr_t*>(data) = memory->base; return Problem::kNone;
      case 12: *static_cast<size_t*>(data) = memory->bytes; return Problem::kNone;
      default: return Problem::kInvalidValue;
    }
  });
}
FAKE int hipMalloc(void** address, size_t bytes) {
  return call("hipMalloc", [&] {
    uintptr_t base = 0;
    const Problem problem = gpus().allocate(FakeGpus::Kind::kDevice, bytes, base, kDmaBufOffset);
    *address = reinterpret_cast<void*>(base);
    return problem;
  });
}
FAKE int hipFree(void* address) {
  return call("hipFree", [&] {
    return gpus().release(reinterpret_cast<uintptr_t>(address), FakeGpus::Kind::kDevice);
  });
}
FAKE int hipHostMalloc(void** address, size_t bytes, unsigned) {
  return call("hipHostMalloc", [&] {
    uintptr_t base = 0;
    const Problem problem = gpus().allocate(FakeGpus::Kind::kPinned, bytes, base);
    *address = reinterpret_cast<void*>(base);
    return problem;
  });
}
FAKE int hipHostFree(void* address) {
  return call("hipHostFree", [&] {
    return gpus().release(reinterpret_cast<uintptr_t>(address), FakeGpus::Kind::kPinned);
  });
}
FAKE int hsa_amd_portable_export_dmabuf(const void* address, size_t bytes, int* fd,
                                        uint64_t* offset) {
  return call("hsa_amd_portable_export_dmabuf", [&] {
    size_t at = 0;
    const Problem problem =
        gpus().export_memory(reinterpret_cast<uintptr_t>(address), bytes, *fd, at);
    *offset = at;
    return problem;
  });
}
FAKE int hipDeviceGetAttribute(int* value, int attribute, int) {
  return call("hipDeviceGetAttribute", [&] {
    if (attribute != 10005) return Problem::kInvalidValue;
    *reinterpret_cast<volatile uint32_t**>(value) = &hdp_flush_register;
    return Problem::kNone;
  });
}
// What was written there last, which clears it.
FAKE uint32_t fake_gpu_hdp_flushed() { return std::exchange(hdp_flush_register, 0); }
FAKE int hipStreamCreateWithFlags(void** stream, unsigned) {
  return call("hipStreamCreateWithFlags", [&] { return gpus().create_stream(*stream); });
}
FAKE int hipStreamDestroy(void* stream) {
  return call("hipStreamDestroy", [&] { return gpus().destroy_stream(stream); });
}
FAKE int hipStreamBeginCapture(void* stream, int mode) {
  return call("hipStreamBeginCapture", [&] { return gpus().begin_capture(stream, mode); });
}
FAKE int hipStreamEndCapture(void* stream, void** graph) {
  *graph = nullptr;  // nobody launches it
  return call("hipStreamEndCapture", [&] { return gpus().end_capture(stream); });
}
FAKE int hipStreamIsCapturing(void* stream, int* status) {
  return call("hipStreamIsCapturing", [&] {
    *status = gpus().is_capturing(stream) ? 1 : 0;
    return Problem::kNone;
  });
}
FAKE int hipThreadExchangeStreamCaptureMode(int* mode) {
  return call("hipThreadExchangeStreamCaptureMode", [&] {
    std::swap(*mode, FakeGpus::capture_mode());
    return Problem::kNone;
  });
}
FAKE int hipEventCreateWithFlags(void** event, unsigned) {
  return call("hipEventCreateWithFlags", [&] { return gpus().create_event(*event); });
}
FAKE int hipEventDestroy(void* event) {
  return call("hipEventDestroy", [&] { return gpus().destroy_event(event); });
}
FAKE int hipEventRecord(void* event, void* stream) {
  return call("hipEventRecord", [&] { return gpus().record(event, stream); });
}
FAKE int hipEventQuery(void* event) {
  return call("hipEventQuery", [&] { return gpus().query(event); });
}
FAKE int hipMemcpyAsync(void* to, const void* from, size_t bytes, int kind, void* stream) {
  return call("hipMemcpyAsync", [&] {
    if (kind != 4) return Problem::kInvalidValue;
    const size_t copied = gpus().copied(to, from, bytes);
    return gpus().submit(stream, [=] { std::memcpy(to, from, copied); });
  });
}
FAKE int hipMemsetAsync(void* to, int value, size_t bytes, void* stream) {
  return call("hipMemsetAsync",
              [&] { return gpus().submit(stream, [=] { std::memset(to, value, bytes); }); });
}
FAKE int hipMemset2DAsync(void* to, size_t pitch, int value, size_t bytes, size_t rows,
                          void* stream) {
  return call("hipMemset2DAsync", [&] {
    return gpus().submit(stream, [=] {
      for (size_t row = 0; row < rows; ++row) {
        std::memset(static_cast<std::byte*>(to) + row * pitch, value, bytes);
      }
    });
  });
}
FAKE int hipModuleLoadData(void** module, const void* data) {
  return call("hipModuleLoadData", [&] { return gpus().load_module(data, *module); });
}
FAKE int hipModuleUnload(void* module) {
  return call("hipModuleUnload", [&] { return gpus().unload_module(module); });
}
FAKE int hipModuleGetFunction(void** function, void* module, const char* name) {
  return call("hipModuleGetFunction",
              [&] { return gpus().find_function(module, name, *function); });
}
FAKE int hipModuleLaunchKernel(void* function, unsigned groups_x, unsigned groups_y, unsigned,
                               unsigned threads, unsigned, unsigned, unsigned, void* stream,
                               void** arguments, void**) {
  return call("hipModuleLaunchKernel", [&] {
    return gpus().launch(function, groups_x, groups_y, threads, arguments, stream);
  });
}
FAKE int hipDeviceGetUuid(void* uuid, int device) {
  return call("hipDeviceGetUuid", [&] {
    std::snprintf(static_cast<char*>(uuid), 16, "fake-gpu-%d", device);
    return Problem::kNone;
  });
}
FAKE int hipDeviceCanAccessPeer(int* can, int device, int peer) {
  return call("hipDeviceCanAccessPeer", [&] {
    *can = device != peer && std::getenv("FAKE_GPU_NO_PEERS") == nullptr;
    return Problem::kNone;
  });
}
FAKE int hipIpcGetMemHandle(FakeGpus::IpcHandle* handle, void* address) {
  return call("hipIpcGetMemHandle",
              [&] { return gpus().export_handle(reinterpret_cast<uintptr_t>(address), *handle); });
}
FAKE int hipIpcOpenMemHandle(void** address, FakeGpus::IpcHandle handle, unsigned flags) {
  return call("hipIpcOpenMemHandle", [&] {
    uintptr_t base = 0;
    const Problem problem = gpus().open_handle(handle, flags, base);
    *address = reinterpret_cast<void*>(base);
    return problem;
  });
}
FAKE int hipIpcCloseMemHandle(void* address) {
  return call("hipIpcCloseMemHandle",
              [&] { return gpus().close_handle(reinterpret_cast<uintptr_t>(address)); });
}
FAKE int hipMemGetAddressRange(void** base, size_t* bytes, void* address) {
  return call("hipMemGetAddressRange", [&] {
    const auto memory = gpus().find(reinterpret_cast<uintptr_t>(address));
    if (!memory) return Problem::kInvalidValue;
    *base = reinterpret_cast<void*>(memory->base);
    *bytes = memory->bytes;
    return Problem::kNone;
  });
}
