// CUDA's driver API. Declared here rather than included, so that building needs no toolkit; the
// names with _v2 are those that cuda.h gives its functions since CUDA 4.

#include <unistd.h>

#include <array>
#include <cctype>
#include <mutex>
#include <vector>

#include "device/gpu_library.h"

namespace kvxfer {
namespace {

using Result = int;
using Context = void*;
using Address = unsigned long long;

constexpr Result kSuccess = 0, kNotReady = 600;
constexpr int kPointerMemoryType = 2, kPointerIsManaged = 8, kPointerDevice = 9;
constexpr int kPointerRangeStart = 11, kPointerRangeSize = 12;
constexpr unsigned kMemoryHost = 1;
constexpr int kDmaBufSupported = 124;  // CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
constexpr int kHandleDmaBufFd = 1;
// CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS and _WRITES_ORDERING
constexpr int kFlushOptions = 117, kWritesOrdering = 118;
constexpr int kFlushByHost = 1, kOrderedForOwner = 100, kFlushCurrentContext = 0;
constexpr unsigned kPortable = 1;
constexpr unsigned kNonBlocking = 1;
constexpr unsigned kDisableTiming = 2;
constexpr int kRelaxedCapture = 2;       // CU_STREAM_CAPTURE_MODE_RELAXED
constexpr unsigned kLazyPeerAccess = 1;  // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
// Of the default stream, while a stream is captured that it would wait for.
constexpr Result kCaptureImplicit = 906;

struct Calls {
  Result (*init)(unsigned flags) = nullptr;
  Result (*driver_version)(int* version) = nullptr;
  Result (*error_name)(Result code, const char** name) = nullptr;
  Result (*error_string)(Result code, const char** text) = nullptr;
  Result (*device_count)(int* count) = nullptr;
  Result (*device_attribute)(int* value, int attribute, int device) = nullptr;
  Result (*pci_bus_id)(char* text, int bytes, int device) = nullptr;
  Result (*retain_primary)(Context* context, int device) = nullptr;
  Result (*push)(Context context) = nullptr;
  Result (*pop)(Context* context) = nullptr;
  Result (*pointer_attributes)(unsigned count, int* attributes, void** data,
                               Address address) = nullptr;
  Result (*memory_alloc)(Address* address, size_t bytes) = nullptr;
  Result (*memory_free)(Address address) = nullptr;
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
  Result (*copy_async)(Address to, Address from, size_t bytes, void* stream) = nullptr;
  Result (*set_async)(Address to, unsigned char value, size_t bytes, void* stream) = nullptr;
  Result (*set_rows_async)(Address to, size_t pitch, unsigned char value, size_t bytes, size_t rows,
                           void* stream) = nullptr;
  Result (*module_load)(void** module, const void* code) = nullptr;
  Result (*module_unload)(void* module) = nullptr;
  Result (*module_function)(void** function, void* module, const char* name) = nullptr;
  Result (*launch)(void* function, unsigned groups_x, unsigned groups_y, unsigned groups_z,
                   unsigned threads_x, unsigned threads_y, unsigned threads_z,
                   unsigned shared_bytes, void* stream, void** arguments, void** extra) = nullptr;
  // May be missing: then adapters' writes have to be pushed another way.
  Result (*flush_writes)(int target, int scope) = nullptr;
  // The same: then there are no dmabufs.
  Result (*handle_for_range)(void* handle, Address address, size_t bytes, int type,
                             unsigned long long flags) = nullptr;
  // May be missing: then there is no memory of other processes. Handles go by value.
  Result (*uuid)(void* uuid, int device) = nullptr;
  Result (*can_access_peer)(int* can, int device, int peer) = nullptr;
  Result (*ipc_export)(GpuIpcHandle* handle, Address address) = nullptr;
  Result (*ipc_open)(Address* address, GpuIpcHandle handle, unsigned flags) = nullptr;
  Result (*ipc_close)(Address address) = nullptr;
  Result (*address_range)(Address* base, size_t* bytes, Address address) = nullptr;
  bool has_ipc = false;

  // Returns the name of a function that the library lacks, if any.
  std::string find(const SharedLibrary& library) {
    GpuFunctions find(library);
    find(init, "cuInit");
    find(driver_version, "cuDriverGetVersion");
    find(error_name, "cuGetErrorName");
    find(error_string, "cuGetErrorString");
    find(device_count, "cuDeviceGetCount");
    find(device_attribute, "cuDeviceGetAttribute");
    find(pci_bus_id, "cuDeviceGetPCIBusId");
    find(retain_primary, "cuDevicePrimaryCtxRetain");
    find(push, "cuCtxPushCurrent_v2");
    find(pop, "cuCtxPopCurrent_v2");
    find(pointer_attributes, "cuPointerGetAttributes");
    find(memory_alloc, "cuMemAlloc_v2");
    find(memory_free, "cuMemFree_v2");
    find(host_alloc, "cuMemHostAlloc");
    find(host_free, "cuMemFreeHost");
    find(stream_create, "cuStreamCreate");
    find(stream_destroy, "cuStreamDestroy_v2");
    find(stream_is_capturing, "cuStreamIsCapturing");
    find(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
    find(event_create, "cuEventCreate");
    find(event_destroy, "cuEventDestroy_v2");
    find(event_record, "cuEventRecord");
    find(event_query, "cuEventQuery");
    find(copy_async, "cuMemcpyAsync");
    find(set_async, "cuMemsetD8Async");
    find(set_rows_async, "cuMemsetD2D8Async");
    find(module_load, "cuModuleLoadData");
    find(module_unload, "cuModuleUnload");
    find(module_function, "cuModuleGetFunction");
    find(launch, "cuLaunchKernel");
    library.find(flush_writes, "cuFlushGPUDirectRDMAWrites");
    library.find(handle_for_range, "cuMemGetHandleForAddressRange");
    // Of CUDA 11.4 and 11.0; the rest are older.
    has_ipc = library.find(uuid, "cuDeviceGetUuid_v2") &&
              library.find(ipc_open, "cuIpcOpenMemHandle_v2") &&
              library.find(can_access_peer, "cuDeviceCanAccessPeer") &&
              library.find(ipc_export, "cuIpcGetMemHandle") &&
              library.find(ipc_close, "cuIpcCloseMemHandle") &&
              library.find(address_range, "cuMemGetAddressRange_v2");
    return find.missing();
  }
};

class CudaRuntime final : public GpuRuntime {
 public:
  CudaRuntime(const Calls& calls, const std::string& library) : calls_(calls) {
    check(calls_.init(0), "cuInit");
    int version = 0;
    check(calls_.driver_version(&version), "cuDriverGetVersion");
    name_ = "CUDA " + std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10) +
            " (" + library + ")";
  }

  GpuVendor vendor() const override { return GpuVendor::kNvidia; }
  std::string name() const override { return name_; }

  int device_count() override {
    int count = 0;
    check(calls_.device_count(&count), "cuDeviceGetCount");
    return count;
  }

  std::string pci_address(int device) override {
    std::array<char, 32> text = {};
    check(calls_.pci_bus_id(text.data(), static_cast<int>(text.size()), device),
          "cuDeviceGetPCIBusId");
    std::string address = text.data();
    for (char& letter : address) letter = static_cast<char>(std::tolower(letter));
    return address;
  }

  GpuIdentity identity(int device) override {
    check_ipc();
    GpuIdentity found{{}, pci_address(device)};
    check(calls_.uuid(found.uuid.data(), device), "cuDeviceGetUuid");
    return found;
  }
  bool reaches(int device, int other) override {
    check_ipc();
    int can = 0;
    check(calls_.can_access_peer(&can, device, other), "cuDeviceCanAccessPeer");
    return can != 0;
  }

  // The primary context is the one that torch and the CUDA runtime use; it is kept for good.
  Before set_device(int device) override {
    check(calls_.push(context(device)), "cuCtxPushCurrent");
    int mode = kRelaxedCapture;
    const Result result = calls_.exchange_capture_mode(&mode);
    if (result != kSuccess) pop();
    check(result, "cuThreadExchangeStreamCaptureMode");
    return {nullptr, mode};
  }
  void restore_device(const Before& before) noexcept override {
    int mode = before.capture_mode;
    calls_.exchange_capture_mode(&mode);
    pop();
  }

  std::optional<GpuMemory> find_memory(const void* pointer) override {
    std::array<int, 5> attributes = {kPointerMemoryType, kPointerIsManaged, kPointerDevice,
                                     kPointerRangeStart, kPointerRangeSize};
    unsigned type = 0;
    unsigned managed = 0;  // the driver writes one byte or four
    int device = 0;
    Address base = 0;
    size_t bytes = 0;
    std::array<void*, 5> data = {&type, &managed, &device, &base, &bytes};
    const Result result = calls_.pointer_attributes(
        attributes.size(), attributes.data(), data.data(), reinterpret_cast<uintptr_t>(pointer));
    check(result, "cuPointerGetAttributes");
    if (type == 0) return std::nullopt;
    const auto kind = managed != 0          ? GpuMemory::Kind::kManaged
                      : type == kMemoryHost ? GpuMemory::Kind::kHost
                                            : GpuMemory::Kind::kDevice;
    return GpuMemory{kind, device, base, bytes};
  }

  uint64_t allocate(size_t bytes) override {
    Address address = 0;
    check(calls_.memory_alloc(&address, bytes), "cuMemAlloc");
    return address;
  }
  void free(uint64_t address) noexcept override { calls_.memory_free(address); }

  void* allocate_host(size_t bytes) override {
    void* address = nullptr;
    check(calls_.host_alloc(&address, bytes, kPortable), "cuMemHostAlloc");
    return address;
  }
  void free_host(void* address) noexcept override { calls_.host_free(address); }

  GpuIpcHandle export_memory(uint64_t address) override {
    check_ipc();
    GpuIpcHandle handle{};
    check(calls_.ipc_export(&handle, address), "cuIpcGetMemHandle");
    return handle;
  }
  uint64_t open_memory(const GpuIpcHandle& handle) override {
    check_ipc();
    Address address = 0;
    check(calls_.ipc_open(&address, handle, kLazyPeerAccess), "cuIpcOpenMemHandle");
    return address;
  }
  void close_memory(uint64_t address) noexcept override { calls_.ipc_close(address); }
  uint64_t opened_bytes(uint64_t address) override {
    check_ipc();
    Address base = 0;
    size_t bytes = 0;
    check(calls_.address_range(&base, &bytes, address), "cuMemGetAddressRange");
    return bytes - (address - base);
  }

  void settle_writes(int device, const std::function<void()>& read_back) override {
    if (attribute(kWritesOrdering, device) >= kOrderedForOwner) return;
    if (calls_.flush_writes == nullptr || (attribute(kFlushOptions, device) & kFlushByHost) == 0) {
      return read_back();
    }
    check(calls_.flush_writes(kFlushCurrentContext, kOrderedForOwner),
          "cuFlushGPUDirectRDMAWrites");
  }

  Stream create_stream() override {
    Stream stream = nullptr;
    check(calls_.stream_create(&stream, kNonBlocking), "cuStreamCreate");
    return stream;
  }
  void destroy_stream(Stream stream) noexcept override { calls_.stream_destroy(stream); }
  bool is_capturing(Stream stream) override {
    int status = 0;
    const Result result = calls_.stream_is_capturing(stream, &status);
    if (result == kCaptureImplicit) return true;
    check(result, "cuStreamIsCapturing");
    return status != 0;
  }
  Event create_event() override {
    Event event = nullptr;
    check(calls_.event_create(&event, kDisableTiming), "cuEventCreate");
    return event;
  }
  void destroy_event(Event event) noexcept override { calls_.event_destroy(event); }
  void record(Event event, Stream stream) override {
    check(calls_.event_record(event, stream), "cuEventRecord");
  }
  bool happened(Event event) override {
    const Result result = calls_.event_query(event);
    if (result == kNotReady) return false;
    check(result, "cuEventQuery");
    return true;
  }

  // Addresses are unified: the driver sees which side each is on.
  void copy(void* to, const void* from, size_t bytes, Stream stream) override {
    check(calls_.copy_async(reinterpret_cast<uintptr_t>(to), reinterpret_cast<uintptr_t>(from),
                            bytes, stream),
          "cuMemcpyAsync");
  }
  void set(uint64_t to, uint8_t value, size_t bytes, Stream stream) override {
    check(calls_.set_async(to, value, bytes, stream), "cuMemsetD8Async");
  }
  void set_rows(uint64_t to, size_t pitch, uint8_t value, size_t bytes, size_t rows,
                Stream stream) override {
    check(calls_.set_rows_async(to, pitch, value, bytes, rows, stream), "cuMemsetD2D8Async");
  }

  Module load_module(const void* code) override {
    Module module = nullptr;
    check(calls_.module_load(&module, code), "cuModuleLoadData");
    return module;
  }
  void unload_module(Module module) noexcept override { calls_.module_unload(module); }
  Function find_function(Module module, const char* name) override {
    Function function = nullptr;
    check(calls_.module_function(&function, module, name),
          std::string("cuModuleGetFunction of ") + name);
    return function;
  }
  void launch(Function function, uint32_t groups_x, uint32_t groups_y, uint32_t threads,
              void** arguments, Stream stream) override {
    check(calls_.launch(function, groups_x, groups_y, 1, threads, 1, 1, 0, stream, arguments,
                        nullptr),
          "cuLaunchKernel");
  }

 private:
  DmaBuf export_range(const GpuMemory& memory, uint64_t address, size_t bytes) override {
    int supported = 0;
    if (calls_.handle_for_range != nullptr) {
      check(calls_.device_attribute(&supported, kDmaBufSupported, memory.device),
            "cuDeviceGetAttribute");
    }
    if (supported == 0) {
      throw Error(
          StatusCode::kNoResources,
          "device " + std::to_string(memory.device) +
              " cannot export dmabufs: that takes CUDA 11.7, the open kernel modules of the "
              "NVIDIA driver and Linux 5.12; the peer-memory module nvidia-peermem does "
              "without");
    }
    // Handles are of whole host pages; small allocations lie between others in theirs. Flag 1, a
    // mapping over PCIe, is refused by some devices.
    const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
    const uint64_t begin = address / page * page;
    const uint64_t end = (address + bytes + page - 1) / page * page;
    int fd = -1;
    check(calls_.handle_for_range(&fd, begin, end - begin, kHandleDmaBufFd, 0),
          "cuMemGetHandleForAddressRange");
    return {UniqueFd(fd), address - begin};
  }

  // 0 where the driver is too old to know it.
  int attribute(int which, int device) const {
    int value = 0;
    return calls_.device_attribute(&value, which, device) == kSuccess ? value : 0;
  }

  void check(Result result, const std::string& call) const {
    if (result == kSuccess) return;
    const char* name = nullptr;
    const char* text = nullptr;
    calls_.error_name(result, &name);
    calls_.error_string(result, &text);
    throw_gpu_error(call, result, name, text);
  }

  void check_ipc() const {
    if (!calls_.has_ipc) {
      throw Error(StatusCode::kNoResources,
                  name_ + " has not all calls for memory of other processes: it takes CUDA 11.4");
    }
  }

  void pop() noexcept {
    Context popped = nullptr;
    calls_.pop(&popped);
  }

  Context context(int device) {
    const std::lock_guard lock(mutex_);
    const auto index = static_cast<size_t>(device);
    if (contexts_.size() <= index) contexts_.resize(index + 1);
    if (contexts_[index] == nullptr) {
      check(calls_.retain_primary(&contexts_[index], device), "cuDevicePrimaryCtxRetain");
    }
    return contexts_[index];
  }

  const Calls calls_;
  std::string name_;
  std::mutex mutex_;
  std::vector<Context> contexts_;
};

}  // namespace

GpuSearch load_cuda() {
  const SharedLibrary library(gpu_library_names("KVXFER_CUDA_LIBRARY", {"libcuda.so.1"}));
  if (!library.found()) {
    return {nullptr, library.problem() + "; it comes with the NVIDIA driver"};
  }
  Calls calls;
  if (const std::string missing = calls.find(library); !missing.empty()) {
    return {nullptr, library.name() + " has no " + missing + ": the driver is too old, update it"};
  }
  try {
    auto runtime = std::make_shared<CudaRuntime>(calls, library.name());
    if (runtime->device_count() == 0) return {nullptr, runtime->name() + " finds no device"};
    return {std::move(runtime), ""};
  } catch (const Error& error) {
    return {nullptr, error.what()};
  }
}

}  // namespace kvxfer
