#ifndef KVXFER_TESTS_GPU_FAKE_LIBRARY_H_
#define KVXFER_TESTS_GPU_FAKE_LIBRARY_H_

#include <dlfcn.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "device/gpu_runtime.h"
#include "pack/gpu_packer.h"

namespace kvxfer::gpu {

// The runtimes of tests/gpu/fake_*.cc, one library for all vendors.
class FakeLibrary {
 public:
  FakeLibrary() : handle_(::dlopen(KVXFER_FAKE_GPU, RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr) throw std::runtime_error(::dlerror());
    find(fail_, "fake_gpu_fail");
    find(open_handles_, "fake_gpu_open_handles");
    find(hold_, "fake_gpu_hold");
    find(begin_capture_[0], "cuStreamBeginCapture_v2");
    find(begin_capture_[1], "hipStreamBeginCapture");
    find(end_capture_[0], "cuStreamEndCapture");
    find(end_capture_[1], "hipStreamEndCapture");
    for (const char* name : {"KVXFER_CUDA_LIBRARY", "KVXFER_HIP_LIBRARY", "KVXFER_HSA_LIBRARY"}) {
      ::setenv(name, KVXFER_FAKE_GPU, 1);
    }
  }

  // The nth call of that name from now on runs out of memory; 0 is the next one.
  void fail(const char* call, unsigned nth = 0) const { fail_(call, 4, nth); }
  // Allocations, streams, events and modules that are there.
  size_t open_handles() const { return open_handles_(); }

  // Nothing happens on any stream until they are let go.
  void hold(bool held) const { hold_(nullptr, held ? 1 : 0); }

  // Of a graph, in the mode "global", which others may disturb. The device must be current.
  void begin_capture(GpuVendor vendor, void* stream) const {
    if (begin_capture_[vendor == GpuVendor::kAmd](stream, 0) != 0)
      throw std::runtime_error("begin");
  }
  // Whether nobody disturbed it.
  bool end_capture(GpuVendor vendor, void* stream) const {
    void* graph = nullptr;
    return end_capture_[vendor == GpuVendor::kAmd](stream, &graph) == 0;
  }

  static CodeObject code() { return {"fake", "fake code", {}}; }

 private:
  template <typename Function>
  void find(Function*& function, const char* name) const {
    function = reinterpret_cast<Function*>(::dlsym(handle_, name));
    if (function == nullptr) throw std::runtime_error(name);
  }

  void* const handle_;
  void (*fail_)(const char*, int, unsigned) = nullptr;
  size_t (*open_handles_)() = nullptr;
  void (*hold_)(void*, int) = nullptr;
  int (*begin_capture_[2])(void*, int) = {};
  int (*end_capture_[2])(void*, void**) = {};
};

}  // namespace kvxfer::gpu

#endif  // KVXFER_TESTS_GPU_FAKE_LIBRARY_H_
