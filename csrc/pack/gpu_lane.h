#ifndef KVXFER_PACK_GPU_LANE_H_
#define KVXFER_PACK_GPU_LANE_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "device/gpu_runtime.h"
#include "kvxfer/status.h"

namespace kvxfer {

// Memory of a device, or of the host that a device copies fast, freed at the end.
class GpuBytes {
 public:
  enum class Where : uint8_t { kDevice, kHost };

  GpuBytes(GpuRuntime& runtime, Where where, size_t bytes)
      : runtime_(runtime), where_(where), size_(bytes) {
    if (where == Where::kDevice) {
      address_ = runtime.allocate(bytes);
    } else {
      address_ = reinterpret_cast<uintptr_t>(runtime.allocate_host(bytes));
    }
  }
  ~GpuBytes() {
    if (where_ == Where::kDevice) {
      runtime_.free(address_);
    } else {
      runtime_.free_host(reinterpret_cast<void*>(address_));
    }
  }
  GpuBytes(const GpuBytes&) = delete;
  GpuBytes& operator=(const GpuBytes&) = delete;

  uint64_t address() const { return address_; }
  std::byte* data() const { return reinterpret_cast<std::byte*>(address_); }
  size_t size() const { return size_; }

 private:
  GpuRuntime& runtime_;
  const Where where_;
  const size_t size_;
  uint64_t address_ = 0;
};

// What one chunk needs on a device: a stream, room for its wire bytes, there and on the host, and
// for tables. Used by one thread at a time, under a CurrentDevice.
class GpuLane {
 public:
  // finish() waits `limit` at most.
  GpuLane(GpuRuntime& runtime, size_t slot_bytes, Duration limit, const std::atomic<bool>& hurried)
      : runtime_(runtime),
        limit_(limit),
        hurried_(hurried),
        slot_(runtime, GpuBytes::Where::kDevice, slot_bytes),
        host_slot_(runtime, GpuBytes::Where::kHost, slot_bytes) {
    make_tables(64 << 10);
    stream_ = runtime.create_stream();
    try {
      ended_ = runtime.create_event();
    } catch (...) {
      runtime.destroy_stream(stream_);
      throw;
    }
  }
  ~GpuLane() {
    runtime_.destroy_event(ended_);
    runtime_.destroy_stream(stream_);
  }
  GpuLane(const GpuLane&) = delete;
  GpuLane& operator=(const GpuLane&) = delete;

  GpuRuntime::Stream stream() const { return stream_; }
  uint64_t slot() const { return slot_.address(); }
  // Nothing else of the host is ever read or written by the device: what it does late, after it was
  // given up, changes nobody's memory.
  std::byte* host_slot() const { return host_slot_.data(); }

  // Begins a set of tables of this size in all, each rounded up to 16 bytes.
  void begin_tables(size_t bytes) {
    used_ = 0;
    const size_t size = tables_.back()->device.size();
    if (bytes > size) make_tables(std::max(bytes, 2 * size));
  }

  // Adds a table; returns where it will be on the device.
  template <class T>
  uint64_t add_table(std::span<const T> values) {
    const uint64_t at = add_room(values.size_bytes());
    if (!values.empty()) {
      std::memcpy(host_of(at), values.data(), values.size_bytes());
    }
    return at;
  }
  // The same for bytes that are zero.
  uint64_t add_zeros(size_t bytes) {
    const uint64_t at = add_room(bytes);
    std::memset(host_of(at), 0, bytes);
    return at;
  }

  void upload_tables() {
    runtime_.copy(tables_.back()->device.data(), tables_.back()->host.data(), used_, stream_);
  }
  // Copies a table back to where read() finds it.
  void download(uint64_t at, size_t bytes) {
    runtime_.copy(host_of(at), reinterpret_cast<const void*>(at), bytes, stream_);
  }
  template <class T>
  const T* read(uint64_t at) const {
    return reinterpret_cast<const T*>(host_of(at));
  }

  // Waits until all that the stream was told is done. Afterwards nothing of it touches memory any
  // more, so it is called when something has failed, too. `hurries`: no more than a second from
  // when `hurried` becomes true. After stuck() no more calls, and no destruction, which would wait
  // for the device.
  void finish(bool hurries = false) {
    insist([&] { runtime_.record(ended_, stream_); });
    TimePoint end = Clock::now() + limit_;
    bool cut = false;
    for (int asked = 0; !insist([&] { return runtime_.happened(ended_); }); ++asked) {
      const TimePoint now = Clock::now();
      if (hurries && !cut && hurried_) {
        cut = true;
        end = std::min<TimePoint>(end, now + std::chrono::seconds(1));
      }
      if (now >= end) {
        stuck_ = true;
        char within[32];
        std::snprintf(within, sizeof(within), "%.3g s",
                      std::chrono::duration<double>(limit_).count());
        throw Error(StatusCode::kNoResources, runtime_.name() +
                                                  " has not finished a chunk within " + within +
                                                  (cut ? ", or a second of the end" : ""));
      }
      std::this_thread::sleep_for(std::chrono::microseconds(asked < 20 ? 10 : 50));
    }
    tries_ = 1;
  }
  bool stuck() const { return stuck_; }
  // As after a finish() that took too long: what was launched may run for ever.
  void abandon() { stuck_ = true; }

 private:
  struct Tables {
    Tables(GpuRuntime& runtime, size_t bytes)
        : device(runtime, GpuBytes::Where::kDevice, bytes),
          host(runtime, GpuBytes::Where::kHost, bytes) {}
    GpuBytes device, host;
  };

  // Who calls finish() again after an error has to know whether something still runs, or the device
  // is given up. So what fails then is tried again for a while.
  template <class Call>
  auto insist(Call call) -> decltype(call()) {
    for (int i = 1;; ++i) {
      try {
        return call();
      } catch (const Error&) {
        if (i >= tries_) {
          tries_ = 20;
          throw;
        }
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }

  void make_tables(size_t bytes) { tables_.push_back(std::make_unique<Tables>(runtime_, bytes)); }
  uint64_t add_room(size_t bytes) {
    const size_t room = (bytes + 15) / 16 * 16;
    if (used_ + room > tables_.back()->device.size()) {
      throw Error(StatusCode::kInvalid, "tables for a GPU are larger than was said");
    }
    used_ += room;
    return tables_.back()->device.address() + used_ - room;
  }
  std::byte* host_of(uint64_t at) const {
    return tables_.back()->host.data() + (at - tables_.back()->device.address());
  }

  GpuRuntime& runtime_;
  const Duration limit_;
  const std::atomic<bool>& hurried_;
  GpuBytes slot_, host_slot_;
  // The last ones are in use, and stay so where there is no memory for larger ones. Those that were
  // outgrown stay, too: to free them would wait for all that runs on the device, however long that
  // is. Together they are no larger than the last, which are twice their forerunners at least.
  std::vector<std::unique_ptr<Tables>> tables_;
  size_t used_ = 0;
  GpuRuntime::Stream stream_ = nullptr;
  GpuRuntime::Event ended_ = nullptr;
  bool stuck_ = false;
  int tries_ = 1;  // of calls on events
};

}  // namespace kvxfer

#endif  // KVXFER_PACK_GPU_LANE_H_
