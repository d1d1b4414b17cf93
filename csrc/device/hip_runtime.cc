// HIP's runtime API, of ROCm 5 to 7. Declared here rather than included: structs of its headers
// changed with ROCm 6, so only calls are used that take none.

#include <array>
#include <cctype>
#include <vector>

#include "device/gpu_library.h"

namespace kvxfer {
namespace {

using Result = int;

constexpr Result kSuccess = 0, kNotReady = 600;
constexpr Result kInvalidValue = 1;  // what hipPointerGetAttribute says of memory unknown to it
constexpr int kPointerMemoryType = 2, kPointerIsManaged = 8, kPointerDevice = 9;
constexpr int kPointerRangeStart = 11, kPointerRangeSize = 12;
constexpr int kHandleDmaBufFd = 1;
constexpr int kHdpFlushRegister = 10005;  // hipDeviceAttributeHdpMemFlushCntl
constexpr unsigned kPortable = 1;
constexpr unsigned kNonBlocking = 1;
constexpr unsigned kDisableTiming = 2;
constexpr int kRelaxedCapture = 2;       // hipStreamCaptureModeRelaxed
constexpr unsigned kLazyPeerAccess = 1;  // hipIpcMemLazyEnablePeerAccess
// Of the default stream, while a stream is captured that it would wait for.
constexpr Result kCaptureImplicit = 906;
constexpr int kCopyDefault = 4;  // hipMemcpyDefault: by the addresses
// Until ROCm 6 hipMemoryType counted host memory as 0 and device memory as 1.
constexpr int kVersionOfNewMemoryTypes = 60000000;

struct Calls {
  Result (*init)(unsigned flags) = nullptr;
  Result (*runtime_version)(int* version) = nullptr;
  const char* (*error_name)(Result code) = nullptr;
  const char* (*error_string)(Result code) = nullptr;
  Result (*last_error)() = nullptr;
  Result (*device_count)(int* count) = nullptr;
  Result (*get_device)(int* device) = nullptr;
  Result (*set_device)(int device) = nullptr;
  Result (*pci_bus_id)(char* text, int bytes, int device) = nullptr;
  Result (*pointer_attribute)(void* data, int attribute, void* address) = nullptr;
  Result (*memory_alloc)(void** address, size_t bytes) = nullptr;
  Result (*memory_free)(void* address) = nullptr;
  Result (*host_alloc)(void** address, size_t bytes, unsigned flags) = nullptr;
  Result (*host_free)(void* address) = nullptr;
  Result (*stream_create)(void** stream, unsigned flags) = nullptr;
  Result (*stream_destroy)(void* stream) = nullptr;
  Result (*stream_is_capturing)(void* stream, int* status) = nullptr;
  Result (*exchange_capture_mode)(int* mode) = nullptr;
  Result (*event_create)(void** event, unsigned flags) = nullptr;
  Result (*event_destroy)(void* event) = nullptr;
  Result (*event_record)(void* event, void* stream) = nullptr;
  Result (*event_query)(void* event) = nullptr;
  Result (*copy_async)(void* to, const void* from, size_t bytes, int kind, void* stream) = nullptr;
  Result (*set_async)(void* to, int value, size_t bytes, void* stream) = nullptr;
  Result (*set_rows_async)(void* to, size_t pitch, int value, size_t bytes, size_t rows,
                           void* stream) = nullptr;
  Result (*module_load)(void** module, const void* code) = nullptr;
  Result (*module_unload)(void* module) = nullptr;
  Result (*module_function)(void** function, void* module, const char* name) = nullptr;
  Result (*launch)(void* function, unsigned groups_x, unsigned groups_y, unsigned groups_z,
                   unsigned threads_x, unsigned threads_y, unsigned threads_z,
                   unsigned shared_bytes, void* stream, void** arguments, void** extra) = nullptr;
  // Each may be missing.
  Result (*device_attribute)(int* value, int attribute, int device) = nullptr;
  Result (*handle_for_range)(void* handle, void* address, size_t bytes, int type,
                             unsigned long long flags) = nullptr;
  int (*export_dmabuf)(const void* address, size_t bytes, int* fd, uint64_t* offset) = nullptr;
  // May be missing: then there is no memory of other processes. Handles go by value.
  Result (*uuid)(void* uuid, int device) = nullptr;
  Result (*can_access_peer)(int* can, int device, int peer) = nullptr;
  Result (*ipc_export)(GpuIpcHandle* handle, void* address) = nullptr;
  Result (*ipc_open)(void** address, GpuIpcHandle handle, unsigned flags) = nullptr;
  Result (*ipc_close)(void* address) = nullptr;
  Result (*address_range)(void** base, size_t* bytes, void* address) = nullptr;
  bool has_ipc = false;

  // Returns the name of a function that the library lacks, if any.
  std::string find(const SharedLibrary& library) {
    GpuFunctions find(library);
    find(init, "hipInit");
    find(runtime_version, "hipRuntimeGetVersion");
    find(error_name, "hipGetErrorName");
    find(error_string, "hipGetErrorString");
    find(last_error, "hipGetLastError");
    find(device_count, "hipGetDeviceCount");
    find(get_device, "hipGetDevice");
    find(set_device, "hipSetDevice");
    find(pci_bus_id, "hipDeviceGetPCIBusId");
    find(pointer_attribute, "hipPointerGetAttribute");
    find(memory_alloc, "hipMalloc");
    find(memory_free, "hipFree");
    find(host_alloc, "hipHostMalloc");
    find(host_free, "hipHostFree");
    find(stream_create, "hipStreamCreateWithFlags");
    find(stream_destroy, "hipStreamDestroy");
    find(stream_is_capturing, "hipStreamIsCapturing");
    find(exchange_capture_mode, "hipThreadExchangeStreamCaptureMode");
    find(event_create, "hipEventCreateWithFlags");
    find(event_destroy, "hipEventDestroy");
    find(event_record, "hipEventRecord");
    find(event_query, "hipEventQuery");
    find(copy_async, "hipMemcpyAsync");
    find(set_async, "hipMemsetAsync");
    find(set_rows_async, "hipMemset2DAsync");
    find(module_load, "hipModuleLoadData");
    find(module_unload, "hipModuleUnload");
    find(module_function, "hipModuleGetFunction");
    find(launch, "hipModuleLaunchKernel");
    library.find(device_attribute, "hipDeviceGetAttribute");
    library.find(handle_for_range, "hipMemGetHandleForAddressRange");
    has_ipc = library.find(uuid, "hipDeviceGetUuid") &&
              library.find(can_access_peer, "hipDeviceCanAccessPeer") &&
              library.find(ipc_export, "hipIpcGetMemHandle") &&
              library.find(ipc_open, "hipIpcOpenMemHandle") &&
              library.find(ipc_close, "hipIpcCloseMemHandle") &&
              library.find(address_range, "hipMemGetAddressRange");
    return find.missing();
  }
};

class HipRuntime final : public GpuRuntime {
 public:
  HipRuntime(const Calls& calls, const std::string& library) : calls_(calls) {
    check(calls_.init(0), "hipInit");
    int version = 0;
    check(calls_.runtime_version(&version), "hipRuntimeGetVersion");
    new_memory_types_ = version >= kVersionOfNewMemoryTypes;
    name_ = "HIP " + std::to_string(version / 10000000) + "." +
            std::to_string(version / 100000 % 100) + " (" + library + ")";
  }

  GpuVendor vendor() const override { return GpuVendor::kAmd; }
  std::string name() const override { return name_; }

  int device_count() override {
    int count = 0;
    check(calls_.device_count(&count), "hipGetDeviceCount");
    return count;
  }

  std::string pci_address(int device) override {
    std::array<char, 32> text = {};
    check(calls_.pci_bus_id(text.data(), static_cast<int>(text.size()), device),
          "hipDeviceGetPCIBusId");
    std::string address = text.data();
    for (char& letter : address) letter = static_cast<char>(std::tolower(letter));
    return address;
  }

  GpuIdentity identity(int device) override {
    check_ipc();
    GpuIdentity found{{}, pci_address(device)};
    check(calls_.uuid(found.uuid.data(), device), "hipDeviceGetUuid");
    return found;
  }
  bool reaches(int device, int other) override {
    check_ipc();
    int can = 0;
    check(calls_.can_access_peer(&can, device, other), "hipDeviceCanAccessPeer");
    return can != 0;
  }

  Before set_device(int device) override {
    int before = 0;
    check(calls_.get_device(&before), "hipGetDevice");
    check(calls_.set_device(device), "hipSetDevice");
    int mode = kRelaxedCapture;
    const Result result = calls_.exchange_capture_mode(&mode);
    if (result != kSuccess) calls_.set_device(before);
    check(result, "hipThreadExchangeStreamCaptureMode");
    return {reinterpret_cast<void*>(static_cast<intptr_t>(before)), mode};
  }
  void restore_device(const Before& before) noexcept override {
    int mode = before.capture_mode;
    calls_.exchange_capture_mode(&mode);
    calls_.set_device(static_cast<int>(reinterpret_cast<intptr_t>(before.device)));
  }

  std::optional<GpuMemory> find_memory(const void* pointer) override {
    unsigned type = 0;
    unsigned managed = 0;
    int device = 0;
    void* base = nullptr;
    size_t bytes = 0;
    const auto ask = [&](void* data, int attribute) {
      return calls_.pointer_attribute(data, attribute, const_cast<void*>(pointer));
    };
    const Result result = ask(&type, kPointerMemoryType);
    if (result == kInvalidValue) {
      calls_.last_error();  // or it would come out of a call that has nothing to do with it
      return std::nullopt;
    }
    check(result, "hipPointerGetAttribute");
    if (new_memory_types_ && type == 0) return std::nullopt;
    check(ask(&managed, kPointerIsManaged), "hipPointerGetAttribute of IS_MANAGED");
    check(ask(&device, kPointerDevice), "hipPointerGetAttribute of DEVICE_ORDINAL");
    check(ask(&base, kPointerRangeStart), "hipPointerGetAttribute of RANGE_START_ADDR");
    check(ask(&bytes, kPointerRangeSize), "hipPointerGetAttribute of RANGE_SIZE");
    const unsigned host = new_memory_types_ ? 1 : 0;
    const auto kind = managed != 0   ? GpuMemory::Kind::kManaged
                      : type == host ? GpuMemory::Kind::kHost
                                     : GpuMemory::Kind::kDevice;
    return GpuMemory{kind, device, reinterpret_cast<uintptr_t>(base), bytes};
  }

  uint64_t allocate(size_t bytes) override {
    void* address = nullptr;
    check(calls_.memory_alloc(&address, bytes), "hipMalloc");
    return reinterpret_cast<uintptr_t>(address);
  }
  void free(uint64_t address) noexcept override {
    calls_.memory_free(reinterpret_cast<void*>(address));
  }

  void* allocate_host(size_t bytes) override {
    void* address = nullptr;
    check(calls_.host_alloc(&address, bytes, kPortable), "hipHostMalloc");
    return address;
  }
  void free_host(void* address) noexcept override { calls_.host_free(address); }

  GpuIpcHandle export_memory(uint64_t address) override {
    check_ipc();
    GpuIpcHandle handle{};
    check(calls_.ipc_export(&handle, reinterpret_cast<void*>(address)), "hipIpcGetMemHandle");
    return handle;
  }
  uint64_t open_memory(const GpuIpcHandle& handle) override {
    check_ipc();
    void* address = nullptr;
    check(calls_.ipc_open(&address, handle, kLazyPeerAccess), "hipIpcOpenMemHandle");
    return reinterpret_cast<uintptr_t>(address);
  }
  void close_memory(uint64_t address) noexcept override {
    if (calls_.ipc_close(reinterpret_cast<void*>(address)) != kSuccess) calls_.last_error();
  }
  uint64_t opened_bytes(uint64_t address) override {
    check_ipc();
    void* base = nullptr;
    size_t bytes = 0;
    check(calls_.address_range(&base, &bytes, reinterpret_cast<void*>(address)),
          "hipMemGetAddressRange");
    return bytes - (address - reinterpret_cast<uintptr_t>(base));
  }

  void settle_writes(int device, const std::function<void()>& read_back) override {
    read_back();
    // What has come over PCIe may still be in the host data path's buffer. The attribute is the
    // address of a register of the device; where there is none, there is no such buffer.
    volatile uint32_t* flush = nullptr;
    if (calls_.device_attribute == nullptr) return;
    const Result result =
        calls_.device_attribute(reinterpret_cast<int*>(&flush), kHdpFlushRegister, device);
    if (result != kSuccess) {
      calls_.last_error();
    } else if (flush != nullptr) {
      *flush = 1;
    }
  }

  Stream create_stream() override {
    Stream stream = nullptr;
    check(calls_.stream_create(&stream, kNonBlocking), "hipStreamCreateWithFlags");
    return stream;
  }
  void destroy_stream(Stream stream) noexcept override { calls_.stream_destroy(stream); }
  bool is_capturing(Stream stream) override {
    int status = 0;
    const Result result = calls_.stream_is_capturing(stream, &status);
    if (result == kCaptureImplicit) {
      calls_.last_error();
      return true;
    }
    check(result, "hipStreamIsCapturing");
    return status != 0;
  }
  Event create_event() override {
    Event event = nullptr;
    check(calls_.event_create(&event, kDisableTiming), "hipEventCreateWithFlags");
    return event;
  }
  void destroy_event(Event event) noexcept override { calls_.event_destroy(event); }
  void record(Event event, Stream stream) override {
    check(calls_.event_record(event, stream), "hipEventRecord");
  }
  bool happened(Event event) override {
    const Result result = calls_.event_query(event);
    if (result == kNotReady) {
      calls_.last_error();
      return false;
    }
    check(result, "hipEventQuery");
    return true;
  }

  void copy(void* to, const void* from, size_t bytes, Stream stream) override {
    check(calls_.copy_async(to, from, bytes, kCopyDefault, stream), "hipMemcpyAsync");
  }
  void set(uint64_t to, uint8_t value, size_t bytes, Stream stream) override {
    check(calls_.set_async(reinterpret_cast<void*>(to), value, bytes, stream), "hipMemsetAsync");
  }
  void set_rows(uint64_t to, size_t pitch, uint8_t value, size_t bytes, size_t rows,
                Stream stream) override {
    check(calls_.set_rows_async(reinterpret_cast<void*>(to), pitch, value, bytes, rows, stream),
          "hipMemset2DAsync");
  }

  Module load_module(const void* code) override {
    Module module = nullptr;
    check(calls_.module_load(&module, code), "hipModuleLoadData");
    return module;
  }
  void unload_module(Module module) noexcept override { calls_.module_unload(module); }
  Function find_function(Module module, const char* name) override {
    Function function = nullptr;
    check(calls_.module_function(&function, module, name),
          std::string("hipModuleGetFunction of ") + name);
    return function;
  }
  void launch(Function function, uint32_t groups_x, uint32_t groups_y, uint32_t threads,
              void** arguments, Stream stream) override {
    check(calls_.launch(function, groups_x, groups_y, 1, threads, 1, 1, 0, stream, arguments,
                        nullptr),
          "hipModuleLaunchKernel");
  }

 private:
  // The descriptor is that of the whole buffer object anyway, whichever part is asked for.
  DmaBuf export_range(const GpuMemory& memory, uint64_t address, size_t) override {
    void* base = reinterpret_cast<void*>(memory.base);
    int fd = -1;
    uint64_t offset = 0;
    // The HSA call comes first, for it says where in the descriptor's memory the allocation is. An
    // allocator cuts several out of one; registered at offset 0, a NIC reads a neighbour's memory.
    if (calls_.export_dmabuf != nullptr) {
      const int result = calls_.export_dmabuf(base, memory.bytes, &fd, &offset);
      if (result != 0) {
        throw_gpu_error("hsa_amd_portable_export_dmabuf", result, nullptr,
                        "the kernel needs CONFIG_DMABUF_MOVE_NOTIFY and CONFIG_PCI_P2PDMA");
      }
    } else if (calls_.handle_for_range != nullptr) {
      check(calls_.handle_for_range(&fd, base, memory.bytes, kHandleDmaBufFd, 0),
            "hipMemGetHandleForAddressRange");
    } else {
      throw Error(StatusCode::kNoResources,
                  name_ + " cannot export dmabufs: it takes ROCm 5.6 with libhsa-runtime64.so.1");
    }
    return {UniqueFd(fd), offset + (address - memory.base)};
  }

  void check_ipc() const {
    if (!calls_.has_ipc) {
      throw Error(StatusCode::kNoResources,
                  name_ + " has not all calls for memory of other processes: update ROCm");
    }
  }

  void check(Result result, const std::string& call) const {
    if (result == kSuccess) return;
    calls_.last_error();
    throw_gpu_error(call, result, calls_.error_name(result), calls_.error_string(result));
  }

  const Calls calls_;
  std::string name_;
  bool new_memory_types_ = true;
};

}  // namespace

GpuSearch load_hip() {
  const SharedLibrary library(gpu_library_names(
      "KVXFER_HIP_LIBRARY", {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"}));
  if (!library.found()) return {nullptr, library.problem() + "; it comes with ROCm"};
  Calls calls;
  if (const std::string missing = calls.find(library); !missing.empty()) {
    return {nullptr, library.name() + " has no " + missing + ": update ROCm to 5.6 or newer"};
  }
  const SharedLibrary hsa(gpu_library_names("KVXFER_HSA_LIBRARY", {"libhsa-runtime64.so.1"}));
  hsa.find(calls.export_dmabuf, "hsa_amd_portable_export_dmabuf");
  try {
    auto runtime = std::make_shared<HipRuntime>(calls, library.name());
    if (runtime->device_count() == 0) return {nullptr, runtime->name() + " finds no device"};
    return {std::move(runtime), ""};
  } catch (const Error& error) {
    return {nullptr, error.what()};
  }
}

}  // namespace kvxfer
