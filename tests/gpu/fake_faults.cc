// What the fault campaign lets go wrong.

#include "gpu/fake_gpu.h"

#define CONTROL extern "C" __attribute__((visibility("default")))

namespace kvxfer::fake {

void FakeGpus::forget_faults() {
  const std::lock_guard lock(mutex_);
  failures_.clear();
  stalled_.clear();
  held_.clear();
  held_devices_.clear();
  all_held_ = lost_ = wrongly_ = false;
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
CONTROL void fake_gpu_forget_faults() { FakeGpus::instance().forget_faults(); }
CONTROL void fake_gpu_damage_shared(unsigned bits) { FakeGpus::instance().damage_shared(bits); }
CONTROL void fake_gpu_lose_copied(unsigned times) { FakeGpus::instance().lose_copied(times); }
