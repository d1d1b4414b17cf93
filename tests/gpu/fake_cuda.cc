// The entry points of libcuda that are used, over FakeGpus.

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "gpu/fake_gpu.h"

#define FAKE extern "C" __attribute__((visibility("default")))

using kvxfer::fake::FakeGpus;
using kvxfer::fake::Problem;
using Address = unsigned long long;

namespace {

FakeGpus& gpus() { return FakeGpus::instance(); }

int code(Problem problem) {
  switch (problem) {
    case Problem::kNone: return 0;
    case Problem::kInvalidValue: return 1;
    case Problem::kOutOfMemory: return 2;
    case Problem::kInvalidContext: return 201;
    case Problem::kInvalidHandle: return 400;
    case Problem::kNotFound: return 500;
    case Problem::kNotReady: return 600;
    case Problem::kLost: return 719;
    case Problem::kCaptureUnsupported: return 900;
    case Problem::kCaptureInvalidated: return 901;
    case Problem::kAlreadyMapped: return 208;
  }
  return 999;
}

// Runs `work` unless the call is to fail.
template <class Work>
int call(const char* name, Work work) {
  const Problem problem = gpus().enter(name);
  return code(problem != Problem::kNone ? problem : work());
}

}  // namespace

FAKE int cuInit(unsigned) {
  return call("cuInit", [] { return Problem::kNone; });
}
FAKE int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
FAKE int cuGetErrorName(int result, const char** name) {
  *name = result == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_FAKE";
  return 0;
}
FAKE int cuGetErrorString(int result, const char** text) {
  *text = result == 2 ? "out of memory" : "made up for a test";
  return 0;
}
FAKE int cuDeviceGetCount(int* count) {
  *count = gpus().count();
  return 0;
}
FAKE int cuDeviceGetAttribute(int* value, int attribute, int) {
  return call("cuDeviceGetAttribute", [&] {
    // How adapters' writes are ordered before what reads them: by the call below, unless said.
    const char* ordered = std::getenv("FAKE_CUDA_ORDERING");
    const char* options = std::getenv("FAKE_CUDA_FLUSH_OPTIONS");
    *value = attribute == 118 ? (ordered != nullptr ? std::atoi(ordered) : 0)
             : attribute == 117 && options != nullptr ? std::atoi(options)
                                                      : 1;
    return Problem::kNone;
  });
}
FAKE int cuFlushGPUDirectRDMAWrites(int target, int scope) {
  return call("cuFlushGPUDirectRDMAWrites", [&] {
    if (FakeGpus::current().empty()) return Problem::kInvalidContext;
    if (target != 0 || scope != 100) return Problem::kInvalidValue;
    gpus().flushed();
    return Problem::kNone;
  });
}
FAKE int cuDeviceGetPCIBusId(char* text, int bytes, int device) {
  return call("cuDeviceGetPCIBusId", [&] {
    std::snprintf(text, static_cast<size_t>(bytes), "0000:%02X:00.0", 0x3b + device);
    return Problem::kNone;
  });
}
FAKE int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = reinterpret_cast<void*>(static_cast<uintptr_t>(device + 1));
  return device < gpus().count() ? 0 : 101;
}
FAKE int cuCtxPushCurrent_v2(void* context) {
  return call("cuCtxPushCurrent", [&] {
    FakeGpus::current().push_back(static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 1);
    return Problem::kNone;
  });
}
FAKE int cuCtxPopCurrent_v2(void** context) {
  if (FakeGpus::current().empty()) return 201;
  *context = reinterpret_cast<void*>(static_cast<uintptr_t>(FakeGpus::current().back() + 1));
  FakeGpus::current().pop_back();
  return 0;
}
FAKE int cuPointerGetAttributes(unsigned count, int* attributes, void** data, Address address) {
  return call("cuPointerGetAttributes", [&] {
    const auto memory = gpus().find(address);
    for (unsigned i = 0; i < count; ++i) {
      switch (attributes[i]) {
        case 2:
          *static_cast<unsigned*>(data[i]) = !memory                                   ? 0
                                             : memory->kind == FakeGpus::Kind::kDevice ? 2
                                                                                       : 1;
          break;
        case 8: *static_cast<bool*>(data[i]) = false; break;
        case 9: *static_cast<int*>(data[i]) = memory ? memory->device : 0; break;
        case 11: *static_cast<Address*>(data[i]) = memory ? memory->base : 0; break;
        case 12: *static_cast<size_t*>(data[i]) = memory ? memory->bytes : 0; break;
        default: return Problem::kInvalidValue;
      }
    }
    return Problem::kNone;
  });
}
FAKE int cuMemAlloc_v2(Address* address, size_t bytes) {
  return call("cuMemAlloc", [&] {
    uintptr_t base = 0;
    const Problem problem = gpus().allocate(FakeGpus::Kind::kDevice, bytes, base);
    *address = base;
    return problem;
  });
}
FAKE int cuMemFree_v2(Address address) {
  return call("cuMemFree", [&] { return gpus().release(address, FakeGpus::Kind::kDevice); });
}
FAKE int cuMemHostAlloc(void** address, size_t bytes, unsigned) {
  return call("cuMemHostAlloc", [&] {
    uintptr_t base = 0;
    const Problem problem = gpus().allocate(FakeGpus::Kind::kPinned, bytes, base);
    *address = reinterpret_cast<void*>(base);
    return problem;
  });
}
FAKE int cuMemFreeHost(void* address) {
  return call("cuMemFreeHost", [&] {
    return gpus().release(reinterpret_cast<uintptr_t>(address), FakeGpus::Kind::kPinned);
  });
}
FAKE int cuMemGetHandleForAddressRange(void* handle, Address address, size_t bytes, int type,
                                       unsigned long long flags) {
  return call("cuMemGetHandleForAddressRange", [&] {
    const auto page = static_cast<Address>(::sysconf(_SC_PAGESIZE));
    if (type != 1 || flags != 0 || address % page != 0 || bytes % page != 0) {
      return Problem::kInvalidValue;
    }
    size_t begin = 0;
    const int& fd = *static_cast<int*>(handle);
    const Problem problem = gpus().export_memory(address, bytes, *static_cast<int*>(handle), begin);
    if (problem == Problem::kNone) ::lseek(fd, static_cast<off_t>(begin), SEEK_SET);
    return problem;
  });
}
FAKE int cuStreamCreate(void** stream, unsigned) {
  return call("cuStreamCreate", [&] { return gpus().create_stream(*stream); });
}
FAKE int cuStreamDestroy_v2(void* stream) {
  return call("cuStreamDestroy", [&] { return gpus().destroy_stream(stream); });
}
FAKE int cuStreamBeginCapture_v2(void* stream, int mode) {
  return call("cuStreamBeginCapture", [&] { return gpus().begin_capture(stream, mode); });
}
FAKE int cuStreamEndCapture(void* stream, void** graph) {
  *graph = nullptr;  // nobody launches it
  return call("cuStreamEndCapture", [&] { return gpus().end_capture(stream); });
}
FAKE int cuStreamIsCapturing(void* stream, int* status) {
  return call("cuStreamIsCapturing", [&] {
    *status = gpus().is_capturing(stream) ? 1 : 0;
    return Problem::kNone;
  });
}
FAKE int cuThreadExchangeStreamCaptureMode(int* mode) {
  return call("cuThreadExchangeStreamCaptureMode", [&] {
    std::swap(*mode, FakeGpus::capture_mode());
    return Problem::kNone;
  });
}
FAKE int cuEventCreate(void** event, unsigned) {
  return call("cuEventCreate", [&] { return gpus().create_event(*event); });
}
FAKE int cuEventDestroy_v2(void* event) {
  return call("cuEventDestroy", [&] { return gpus().destroy_event(event); });
}
FAKE int cuEventRecord(void* event, void* stream) {
  return call("cuEventRecord", [&] { return gpus().record(event, stream); });
}
FAKE int cuEventQuery(void* event) {
  return call("cuEventQuery", [&] { return gpus().query(event); });
}
FAKE int cuMemcpyAsync(Address to, Address from, size_t bytes, void* stream) {
  return call("cuMemcpyAsync", [&] {
    auto* const target = reinterpret_cast<void*>(to);
    const auto* const source = reinterpret_cast<const void*>(from);
    const size_t copied = gpus().copied(target, source, bytes);
    return gpus().submit(stream, [=] { std::memcpy(target, source, copied); });
  });
}
FAKE int cuMemsetD8Async(Address to, unsigned char value, size_t bytes, void* stream) {
  return call("cuMemsetD8Async", [&] {
    return gpus().submit(stream, [=] { std::memset(reinterpret_cast<void*>(to), value, bytes); });
  });
}
FAKE int cuMemsetD2D8Async(Address to, size_t pitch, unsigned char value, size_t bytes, size_t rows,
                           void* stream) {
  return call("cuMemsetD2D8Async", [&] {
    return gpus().submit(stream, [=] {
      for (size_t row = 0; row < rows; ++row) {
        std::memset(reinterpret_cast<void*>(to + row * pitch), value, bytes);
      }
    });
  });
}
FAKE int cuModuleLoadData(void** module, const void* data) {
  return call("cuModuleLoadData", [&] { return gpus().load_module(data, *module); });
}
FAKE int cuModuleUnload(void* module) {
  return call("cuModuleUnload", [&] { return gpus().unload_module(module); });
}
FAKE int cuModuleGetFunction(void** function, void* module, const char* name) {
  return call("cuModuleGetFunction", [&] { return gpus().find_function(module, name, *function); });
}
FAKE int cuLaunchKernel(void* function, unsigned groups_x, unsigned groups_y, unsigned,
                        unsigned threads, unsigned, unsigned, unsigned, void* stream,
                        void** arguments, void**) {
  return call("cuLaunchKernel", [&] {
    return gpus().launch(function, groups_x, groups_y, threads, arguments, stream);
  });
}
FAKE int cuDeviceGetUuid_v2(void* uuid, int device) {
  return call("cuDeviceGetUuid", [&] {
    std::snprintf(static_cast<char*>(uuid), 16, "fake-gpu-%d", device);
    return Problem::kNone;
  });
}
FAKE int cuDeviceCanAccessPeer(int* can, int device, int peer) {
  return call("cuDeviceCanAccessPeer", [&] {
    *can = device != peer && std::getenv("FAKE_GPU_NO_PEERS") == nullptr;
    return Problem::kNone;
  });
}
FAKE int cuIpcGetMemHandle(FakeGpus::IpcHandle* handle, Address address) {
  return call("cuIpcGetMemHandle", [&] { return gpus().export_handle(address, *handle); });
}
FAKE int cuIpcOpenMemHandle_v2(Address* address, FakeGpus::IpcHandle handle, unsigned flags) {
  return call("cuIpcOpenMemHandle", [&] {
    uintptr_t base = 0;
    const Problem problem = gpus().open_handle(handle, flags, base);
    *address = base;
    return problem;
  });
}
FAKE int cuIpcCloseMemHandle(Address address) {
  return call("cuIpcCloseMemHandle", [&] { return gpus().close_handle(address); });
}
FAKE int cuMemGetAddressRange_v2(Address* base, size_t* bytes, Address address) {
  return call("cuMemGetAddressRange", [&] {
    const auto memory = gpus().find(address);
    if (!memory) return Problem::kInvalidValue;
    *base = memory->base;
    *bytes = memory->bytes;
    return Problem::kNone;
  });
}
