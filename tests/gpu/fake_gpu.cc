#include "gpu/fake_gpu.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <set>
#include <string_view>
#include <vector>

namespace kvxfer::fake {
namespace {

constexpr char kCode[] = "fake code";  // what load_module() takes

// Memory of a device begins within a page, as small allocations do.
constexpr size_t kLead = 512;

size_t page_bytes() { return static_cast<size_t>(::sysconf(_SC_PAGESIZE)); }

size_t whole_pages(size_t bytes) {
  return (bytes + page_bytes() - 1) / page_bytes() * page_bytes();
}

// That may wait for streams, or depend on what they have done.
bool is_unsafe(const std::string& call) {
  static const std::set<std::string_view> kUnsafe = {
      "cuEventQuery",  "cuMemAlloc", "cuMemFree", "cuMemHostAlloc", "cuMemFreeHost",
      "hipEventQuery", "hipMalloc",  "hipFree",   "hipHostMalloc",  "hipHostFree"};
  return kUnsafe.contains(call);
}

size_t lead_of(FakeGpus::Kind kind) { return kind == FakeGpus::Kind::kDevice ? kLead : 0; }

}  // namespace

FakeGpus& FakeGpus::instance() {
  static auto* gpus = new FakeGpus;  // its thread never ends
  return *gpus;
}

std::deque<int>& FakeGpus::current() {
  thread_local std::deque<int> current;
  return current;
}

FakeGpus::FakeGpus()
    : count_(std::getenv("FAKE_GPUS") != nullptr ? std::atoi(std::getenv("FAKE_GPUS")) : 2) {
  std::thread([this] { run(); }).detach();
}

Problem FakeGpus::enter(const std::string& call) {
  std::unique_lock lock(mutex_);
  ++calls_[call];
  changed_.wait(lock, [&] { return call != stalled_; });
  if (lost_) return Problem::kLost;
  if (is_unsafe(call) && disturb_captures() != Problem::kNone) return Problem::kCaptureUnsupported;
  const auto failure = failures_.find(call);
  if (failure == failures_.end() || failure->second.first-- > 0) return Problem::kNone;
  const Problem problem = failure->second.second;
  failures_.erase(failure);
  return problem;
}

int& FakeGpus::capture_mode() {
  thread_local int mode = kGlobal;
  return mode;
}

Problem FakeGpus::disturb_captures() {
  Problem problem = Problem::kNone;
  for (auto& [stream, capture] : captures_) {
    const bool ours = capture.thread == std::this_thread::get_id() && capture.mode != kRelaxed;
    const bool others = capture.mode == kGlobal && capture_mode() == kGlobal;
    if (capture_mode() == kRelaxed || (!ours && !others)) continue;
    capture.valid = false;
    problem = Problem::kCaptureUnsupported;
  }
  return problem;
}

Problem FakeGpus::begin_capture(void* stream, int mode) {
  const std::lock_guard lock(mutex_);
  if (find_stream(stream) == nullptr) return Problem::kInvalidHandle;
  captures_[stream] = {mode, std::this_thread::get_id(), true};
  return Problem::kNone;
}

Problem FakeGpus::end_capture(void* stream) {
  const std::lock_guard lock(mutex_);
  const auto capture = captures_.extract(stream);
  if (!capture) return Problem::kInvalidHandle;
  return capture.mapped().valid ? Problem::kNone : Problem::kCaptureInvalidated;
}

bool FakeGpus::is_capturing(void* stream) {
  const std::lock_guard lock(mutex_);
  return captures_.contains(stream);
}

void FakeGpus::fail(const std::string& call, Problem problem, uint32_t nth) {
  const std::lock_guard lock(mutex_);
  failures_[call] = {nth, problem};
}

uint64_t FakeGpus::calls(const std::string& call) {
  const std::lock_guard lock(mutex_);
  return calls_[call];
}

void FakeGpus::stall(const char* call) {
  const std::lock_guard lock(mutex_);
  stalled_ = call != nullptr ? call : "";
  changed_.notify_all();
}

void FakeGpus::lose_devices(bool lost) {
  const std::lock_guard lock(mutex_);
  lost_ = lost;
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

Problem FakeGpus::allocate(Kind kind, size_t bytes, uintptr_t& base) {
  if (current().empty()) return Problem::kInvalidContext;
  if (bytes == 0) return Problem::kInvalidValue;
  const size_t mapped = whole_pages(lead_of(kind) + bytes);
  void* address =
      ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) return Problem::kOutOfMemory;
  base = reinterpret_cast<uintptr_t>(address) + lead_of(kind);
  const std::lock_guard lock(mutex_);
  std::memset(address, 0xd5, mapped);
  if (kind == Kind::kDevice) ::mprotect(address, mapped, PROT_NONE);
  memory_[base] = {kind, current().back(), base, bytes};
  return Problem::kNone;
}

Problem FakeGpus::release(uintptr_t base, Kind kind) {
  const std::lock_guard lock(mutex_);
  const auto found = memory_.find(base);
  if (found == memory_.end() || found->second.kind != kind) return Problem::kInvalidValue;
  const size_t lead = lead_of(kind);
  ::munmap(reinterpret_cast<void*>(base - lead), whole_pages(lead + found->second.bytes));
  memory_.erase(found);
  return Problem::kNone;
}

std::optional<FakeGpus::Memory> FakeGpus::find(uintptr_t address) {
  const std::lock_guard lock(mutex_);
  auto after = memory_.upper_bound(address);
  if (after == memory_.begin()) return std::nullopt;
  const Memory& memory = (--after)->second;
  if (address >= memory.base + memory.bytes) return std::nullopt;
  return memory;
}

Problem FakeGpus::export_memory(uintptr_t base, size_t bytes, int& fd) {
  const std::lock_guard lock(mutex_);
  const bool known = std::any_of(memory_.begin(), memory_.end(), [&](const auto& entry) {
    const Memory& memory = entry.second;
    const uintptr_t begin = memory.base - lead_of(memory.kind);
    return memory.kind == Kind::kDevice && base >= begin &&
           base + bytes <= begin + whole_pages(kLead + memory.bytes);
  });
  if (!known) return Problem::kInvalidValue;
  fd = ::memfd_create("fake-dmabuf", MFD_CLOEXEC);
  if (fd < 0) return Problem::kOutOfMemory;
  return ::ftruncate(fd, static_cast<off_t>(bytes)) == 0 ? Problem::kNone : Problem::kOutOfMemory;
}

Problem FakeGpus::create_stream(void*& stream) {
  const std::lock_guard lock(mutex_);
  if (current().empty()) return Problem::kInvalidContext;
  stream = reinterpret_cast<void*>(next_handle_++);
  streams_[stream].device = current().back();
  return Problem::kNone;
}

Problem FakeGpus::destroy_stream(void* stream) {
  std::unique_lock lock(mutex_);
  const auto found = streams_.find(stream);
  if (found == streams_.end()) return Problem::kInvalidHandle;
  changed_.wait(lock, [&] { return found->second.work.empty() || lost_; });
  streams_.erase(found);
  return Problem::kNone;
}

Problem FakeGpus::create_event(void*& event) {
  const std::lock_guard lock(mutex_);
  if (current().empty()) return Problem::kInvalidContext;
  event = reinterpret_cast<void*>(next_handle_++);
  events_[event].device = current().back();
  return Problem::kNone;
}

Problem FakeGpus::destroy_event(void* event) {
  const std::lock_guard lock(mutex_);
  return events_.erase(event) == 1 ? Problem::kNone : Problem::kInvalidHandle;
}

// The default stream is a null pointer, and has no owner until it is used.
FakeGpus::Stream* FakeGpus::find_stream(void* stream) {
  if (current().empty()) return nullptr;
  if (stream == nullptr) {
    Stream& found = streams_[reinterpret_cast<void*>(static_cast<uintptr_t>(1 + current().back()))];
    found.device = current().back();
    return &found;
  }
  const auto found = streams_.find(stream);
  if (found == streams_.end() || found->second.device != current().back()) return nullptr;
  return &found->second;
}

Problem FakeGpus::record(void* event, void* stream) {
  const std::lock_guard lock(mutex_);
  const auto found = events_.find(event);
  Stream* on = find_stream(stream);
  if (found == events_.end() || on == nullptr || found->second.device != on->device) {
    return Problem::kInvalidHandle;
  }
  found->second.captured = captures_.contains(stream);
  if (found->second.captured) return Problem::kNone;
  const uint64_t number = ++found->second.recorded;
  on->work.emplace_back([this, event, number] {
    const auto known = events_.find(event);
    if (known != events_.end()) known->second.happened = number;
  });
  changed_.notify_all();
  return Problem::kNone;
}

Problem FakeGpus::query(void* event) {
  const std::lock_guard lock(mutex_);
  const auto found = events_.find(event);
  if (found == events_.end()) return Problem::kInvalidHandle;
  if (found->second.captured) {
    for (auto& [stream, capture] : captures_) capture.valid = false;
    return Problem::kCaptureUnsupported;
  }
  return found->second.happened >= found->second.recorded ? Problem::kNone : Problem::kNotReady;
}

Problem FakeGpus::submit(void* stream, std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  Stream* on = find_stream(stream);
  if (on == nullptr) return Problem::kInvalidHandle;
  if (captures_.contains(stream)) return Problem::kNone;  // for a graph, which nobody launches
  on->work.push_back(std::move(work));
  changed_.notify_all();
  return Problem::kNone;
}

Problem FakeGpus::launch(void* function, uint32_t groups_x, uint32_t groups_y, uint32_t,
                         void** arguments, void* stream) {
  auto kernel = reinterpret_cast<Kernel>(function)(arguments);
  return submit(stream,
                [kernel = std::move(kernel), groups_x, groups_y] { kernel(groups_x, groups_y); });
}

Problem FakeGpus::load_module(const void* code, void*& module) {
  const std::lock_guard lock(mutex_);
  if (current().empty()) return Problem::kInvalidContext;
  if (std::string(static_cast<const char*>(code)) != kCode) return Problem::kNotFound;
  module = reinterpret_cast<void*>(next_handle_++);
  modules_.insert(module);
  return Problem::kNone;
}

Problem FakeGpus::unload_module(void* module) {
  const std::lock_guard lock(mutex_);
  return modules_.erase(module) == 1 ? Problem::kNone : Problem::kInvalidHandle;
}

Problem FakeGpus::find_function(void* module, const std::string& name, void*& function) {
  const std::lock_guard lock(mutex_);
  if (!modules_.contains(module)) return Problem::kInvalidHandle;
  function = reinterpret_cast<void*>(find_kernel(name));
  return function != nullptr ? Problem::kNone : Problem::kNotFound;
}

size_t FakeGpus::open_handles() {
  const std::lock_guard lock(mutex_);
  size_t streams = 0;
  for (const auto& [handle, stream] : streams_) {
    if (reinterpret_cast<uintptr_t>(handle) >= 0x1000) ++streams;
  }
  return memory_.size() + streams + events_.size() + modules_.size();
}

void FakeGpus::open_memory(bool open) {
  for (const auto& [base, memory] : memory_) {
    if (memory.kind != Kind::kDevice) continue;
    ::mprotect(reinterpret_cast<void*>(base - kLead), whole_pages(kLead + memory.bytes),
               open ? PROT_READ | PROT_WRITE : PROT_NONE);
  }
}

// Holds the mutex while it works: what it runs takes none.
void FakeGpus::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    std::vector<Stream*> busy;
    for (auto& [handle, stream] : streams_) {
      const bool held =
          all_held_ || held_.contains(handle) || held_devices_.contains(stream.device);
      if (!stream.work.empty() && !held) busy.push_back(&stream);
    }
    if (busy.empty() || lost_) {
      changed_.wait(lock);
      continue;
    }
    if (random_() % 4 == 0) {  // others may submit more meanwhile
      changed_.wait_for(lock, std::chrono::microseconds(random_() % 2000));
      continue;
    }
    Stream& stream = *busy[random_() % busy.size()];
    open_memory(true);
    stream.work.front()();
    open_memory(false);
    stream.work.pop_front();
    changed_.notify_all();
  }
}

}  // namespace kvxfer::fake

// For tests, which load the library as the runtimes' loader does.
extern "C" __attribute__((visibility("default"))) void fake_gpu_fail(const char* call, int problem,
                                                                     unsigned nth) {
  kvxfer::fake::FakeGpus::instance().fail(call, static_cast<kvxfer::fake::Problem>(problem), nth);
}
extern "C" __attribute__((visibility("default"))) uint64_t fake_gpu_calls(const char* call) {
  return kvxfer::fake::FakeGpus::instance().calls(call);
}
extern "C" __attribute__((visibility("default"))) void fake_gpu_stall(const char* call) {
  kvxfer::fake::FakeGpus::instance().stall(call);
}
extern "C" __attribute__((visibility("default"))) size_t fake_gpu_open_handles() {
  return kvxfer::fake::FakeGpus::instance().open_handles();
}
extern "C" __attribute__((visibility("default"))) void fake_gpu_lose_devices(int lost) {
  kvxfer::fake::FakeGpus::instance().lose_devices(lost != 0);
}
extern "C" __attribute__((visibility("default"))) void fake_gpu_hold(void* stream, int held) {
  kvxfer::fake::FakeGpus::instance().hold(stream, held != 0);
}
extern "C" __attribute__((visibility("default"))) void fake_gpu_hold_device(int device, int held) {
  kvxfer::fake::FakeGpus::instance().hold_device(device, held != 0);
}
