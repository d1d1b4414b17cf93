// What tests let go wrong.

#include "gpu/fake_gpu.h"

#include <algorithm>

#define CONTROL extern "C" __attribute__((visibility("default")))

namespace kvxfer::fake {

void FakeGpus::fail(const std::string& call, Problem problem, uint32_t nth, uint32_t times) {
  const std::lock_guard lock(mutex_);
  failures_[call] = {nth, times, problem};
}

void FakeGpus::stall(const char* call) {
  const std::lock_guard lock(mutex_);
  stalled_ = call != nullptr ? call : "";
  changed_.notify_all();
}

void FakeGpus::lose_devices(bool lost) {
  const std::lock_guard lock(mutex_);
  lost_ = lost;
  for (auto& [handle, stream] : streams_) {
    if (lost) stream.work.clear();
  }
  changed_.notify_all();
}

void FakeGpus::hold(void* stream, bool held) {
  const std::lock_guard lock(mutex_);
  if (stream == nullptr) {
    all_held_ = held;
  } else if (held) {
    held_.insert(stream);
  } else {
    held_.erase(stream);
  }
  changed_.notify_all();
}

void FakeGpus::hold_device(int device, bool held) {
  const std::lock_guard lock(mutex_);
  if (held) {
    held_devices_.insert(device);
  } else {
    held_devices_.erase(device);
  }
  changed_.notify_all();
}

void FakeGpus::open_wrongly(bool wrong) {
  const std::lock_guard lock(mutex_);
  wrongly_ = wrong;
}

void FakeGpus::lose_writes(bool lose) {
  const std::lock_guard lock(mutex_);
  lose_writes_ = lose;
}

void FakeGpus::repeat_handles(bool repeat) {
  const std::lock_guard lock(mutex_);
  repeat_handles_ = repeat;
}

void FakeGpus::damage() {
  const std::lock_guard lock(mutex_);
  const auto largest = std::max_element(
      memory_.begin(), memory_.end(),
      [](const auto& a, const auto& b) { return a.second.bytes < b.second.bytes; });
  open_memory(true);
  auto* bytes = reinterpret_cast<unsigned char*>(largest->first);
  for (size_t i = 0; i + 64 < largest->second.bytes; i += 64) bytes[i] ^= 1;
  open_memory(false);
}

void FakeGpus::forget_faults() {
  const std::lock_guard lock(mutex_);
  failures_.clear();
  stalled_.clear();
  held_.clear();
  held_devices_.clear();
  all_held_ = lost_ = wrongly_ = lose_writes_ = repeat_handles_ = false;
  copies_to_lose_ = 0;
  changed_.notify_all();
}

void FakeGpus::damage_shared(uint32_t bits) {
  const std::lock_guard lock(mutex_);
  open_memory(true);
  for (const auto& [base, memory] : memory_) {
    if (!memory.exported && memory.owner == 0) continue;
    for (uint32_t i = 0; i < bits; ++i) {
      reinterpret_cast<unsigned char*>(base)[random_() % memory.bytes] ^= 1u << random_() % 8;
    }
  }
  open_memory(false);
}

void FakeGpus::lose_copied(uint32_t times) {
  const std::lock_guard lock(mutex_);
  copies_to_lose_ = times;
}

size_t FakeGpus::copied(const void* to, const void* from, size_t bytes) {
  const auto is_device = [&](const void* address) {
    const auto memory = find(reinterpret_cast<uintptr_t>(address));
    return memory && memory->kind == Kind::kDevice;
  };
  if (bytes <= 1024 || is_device(to) || !is_device(from)) return bytes;
  const std::lock_guard lock(mutex_);
  if (copies_to_lose_ == 0) return bytes;
  --copies_to_lose_;
  return bytes - 16;
}

}  // namespace kvxfer::fake

using kvxfer::fake::FakeGpus;
using kvxfer::fake::Problem;

CONTROL void fake_gpu_fail_often(const char* call, int problem, unsigned nth, unsigned times) {
  FakeGpus::instance().fail(call, static_cast<Problem>(problem), nth, times);
}
CONTROL void fake_gpu_lose_writes(int lose) { FakeGpus::instance().lose_writes(lose != 0); }
CONTROL void fake_gpu_repeat_handles(int repeat) {
  FakeGpus::instance().repeat_handles(repeat != 0);
}
CONTROL void fake_gpu_forget_faults() { FakeGpus::instance().forget_faults(); }
CONTROL void fake_gpu_damage_shared(unsigned bits) { FakeGpus::instance().damage_shared(bits); }
CONTROL void fake_gpu_lose_copied(unsigned times) { FakeGpus::instance().lose_copied(times); }
