#ifndef KVXFER_DEVICE_GPU_EVENT_H_
#define KVXFER_DEVICE_GPU_EVENT_H_

#include <cstdint>
#include <memory>
#include <utility>

#include "base/unique_fd.h"
#include "device/gpu_runtime.h"
#include "kvxfer/status.h"

namespace kvxfer {

// All that a stream had been told when this was made. Thread-safe.
class GpuEvent {
 public:
  // `stream` is the device's, null for its default stream. Throws Error(kInvalid) for one that is
  // being captured: what is recorded there happens in the graph alone, if at all.
  GpuEvent(std::shared_ptr<GpuRuntime> runtime, int device, GpuRuntime::Stream stream)
      : runtime_(std::move(runtime)), device_(device) {
    const CurrentDevice current(*runtime_, device_);
    if (runtime_->is_capturing(stream)) {
      throw Error(
          StatusCode::kInvalid,
          "what the stream is told is being captured into a graph, and not done now, so it "
          "cannot be waited for: make offers and fetches, and mark layers as ready, outside "
          "of the capture");
    }
    event_ = runtime_->create_event();
    try {
      runtime_->record(event_, stream);
    } catch (...) {
      runtime_->destroy_event(event_);
      throw;
    }
  }
  ~GpuEvent() {
    if (generation_ != fork_generation()) return;
    try {
      const CurrentDevice current(*runtime_, device_);
      runtime_->destroy_event(event_);
    } catch (const Error&) {
      // The device is gone, and its events with it.
    }
  }
  GpuEvent(const GpuEvent&) = delete;
  GpuEvent& operator=(const GpuEvent&) = delete;

  GpuRuntime::Event get() const { return event_; }
  bool happened() const {
    const CurrentDevice current(*runtime_, device_);
    return runtime_->happened(event_);
  }

 private:
  const std::shared_ptr<GpuRuntime> runtime_;
  const int device_;
  const uint64_t generation_ = fork_generation();
  GpuRuntime::Event event_ = nullptr;
};

}  // namespace kvxfer

#endif  // KVXFER_DEVICE_GPU_EVENT_H_
