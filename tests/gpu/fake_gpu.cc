#include "gpu/fake_gpu.h"

#include <fcntl.h>
#include <signal.h>
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
constexpr size_t kPool = 512u << 20;  // sparse

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
  const auto found = failures_.find(call);
  if (found == failures_.end()) return Problem::kNone;
  Failure& failure = found->second;
  if (failure.nth > 0) {
    --failure.nth;
    return Problem::kNone;
  }
  const Problem problem = failure.problem;
  if (--failure.times == 0) failures_.erase(found);
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

uint64_t FakeGpus::calls(const std::string& call) {
  const std::lock_guard lock(mutex_);
  return calls_[call];
}

Problem FakeGpus::allocate(Kind kind, size_t bytes, uintptr_t& base, size_t lead) {
  if (current().empty()) return Problem::kInvalidContext;
  if (bytes == 0) return Problem::kInvalidValue;
  if (kind == Kind::kDevice) {
    const std::lock_guard lock(mutex_);
    if (adjacent_) return allocate_in_pool(bytes, base);
  }
  const size_t mapped = whole_pages(lead_of(kind) + bytes);
  int fd = -1;
  if (kind == Kind::kDevice) {
    fd = ::memfd_create("fake-gpu", MFD_CLOEXEC);
    if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(lead + mapped)) != 0) {
      if (fd >= 0) ::close(fd);
      return Problem::kOutOfMemory;
    }
  }
  const int flags = fd >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
  void* address = ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, flags, fd,
                         fd >= 0 ? static_cast<off_t>(lead) : 0);
  if (address == MAP_FAILED) {
    if (fd >= 0) ::close(fd);
    return Problem::kOutOfMemory;
  }
  base = reinterpret_cast<uintptr_t>(address) + lead_of(kind);
  const std::lock_guard lock(mutex_);
  std::memset(address, 0xd5, mapped);
  if (kind == Kind::kDevice) ::mprotect(address, mapped, PROT_NONE);
  memory_[base] = {kind, current().back(), base, bytes, fd, lead};
  return Problem::kNone;
}

void FakeGpus::adjacent(bool adjacent) {
  const std::lock_guard lock(mutex_);
  adjacent_ = adjacent;
}

Problem FakeGpus::allocate_in_pool(size_t bytes, uintptr_t& base) {
  if (pool_used_ == 0) {
    pool_ = ::memfd_create("fake-gpu-pool", MFD_CLOEXEC);
    void* pool = pool_ >= 0 && ::ftruncate(pool_, kPool) == 0
                     ? ::mmap(nullptr, kPool, PROT_NONE, MAP_SHARED, pool_, 0)
                     : MAP_FAILED;
    if (pool == MAP_FAILED) return Problem::kOutOfMemory;
    pool_begin_ = reinterpret_cast<uintptr_t>(pool);
    pool_used_ = kLead;
  }
  if (bytes > kPool - pool_used_) return Problem::kOutOfMemory;
  base = pool_begin_ + pool_used_;
  pool_used_ += bytes;
  Memory& memory = memory_[base] = {Kind::kDevice, current().back(), base, bytes, pool_};
  memory.from_pool = true;
  open_memory(true);
  std::memset(reinterpret_cast<void*>(base), 0xd5, bytes);
  open_memory(false);
  return Problem::kNone;
}

namespace {

// Behind the memory of an allocation, from when it is exported.
struct Openers {
  std::array<std::atomic<int>, 64> pids;
};

struct HandleOf {
  int magic, pid, fd, device;
  size_t lead, bytes;
};
static_assert(sizeof(HandleOf) <= sizeof(FakeGpus::IpcHandle));
constexpr int kMagic = 0x1bc0ffee;

size_t openers_at(size_t lead, size_t bytes) { return lead + whole_pages(kLead + bytes); }

// Whether one of the pids was `from`, and is `to` now.
bool change_opener(int fd, size_t at, int from, int to) {
  void* page =
      ::mmap(nullptr, page_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(at));
  if (page == MAP_FAILED) return false;
  bool changed = false;
  for (auto& pid : static_cast<Openers*>(page)->pids) {
    int expected = from;
    changed = pid.compare_exchange_strong(expected, to);
    if (changed) break;
  }
  ::munmap(page, page_bytes());
  return changed;
}

bool is_open_elsewhere(int fd, size_t at) {
  void* page = ::mmap(nullptr, page_bytes(), PROT_READ, MAP_SHARED, fd, static_cast<off_t>(at));
  if (page == MAP_FAILED) return false;
  const auto& pids = static_cast<const Openers*>(page)->pids;
  const bool open = std::any_of(pids.begin(), pids.end(),
                                [](const auto& pid) { return pid != 0 && ::kill(pid, 0) == 0; });
  ::munmap(page, page_bytes());
  return open;
}

}  // namespace

Problem FakeGpus::release(uintptr_t base, Kind kind) {
  std::unique_lock lock(mutex_);
  const auto found = memory_.find(base);
  if (found == memory_.end() || found->second.kind != kind || found->second.owner != 0) {
    return Problem::kInvalidValue;
  }
  // As the drivers do: for all that runs on the device.
  changed_.wait(lock, [&] {
    return lost_ || std::all_of(streams_.begin(), streams_.end(), [&](const auto& entry) {
             return entry.second.device != found->second.device || entry.second.work.empty();
           });
  });
  const Memory& memory = found->second;
  if (memory.from_pool) {
    memory_.erase(found);
    if (std::none_of(memory_.begin(), memory_.end(),
                     [](const auto& entry) { return entry.second.from_pool; })) {
      ::munmap(reinterpret_cast<void*>(pool_begin_), kPool);
      ::close(pool_);
      pool_used_ = 0;
    }
    return Problem::kNone;
  }
  const size_t lead = lead_of(kind);
  const size_t openers = openers_at(memory.lead, memory.bytes);
  if (memory.fd >= 0 && ::lseek(memory.fd, 0, SEEK_END) > static_cast<off_t>(openers) &&
      is_open_elsewhere(memory.fd, openers)) {
    ++early_frees_;
  }
  ::munmap(reinterpret_cast<void*>(base - lead), whole_pages(lead + memory.bytes));
  if (memory.fd >= 0) ::close(memory.fd);
  memory_.erase(found);
  return Problem::kNone;
}

Problem FakeGpus::export_handle(uintptr_t address, IpcHandle& handle) {
  const auto memory = find(address);
  if (!memory || memory->kind != Kind::kDevice || memory->owner != 0 || memory->from_pool) {
    return Problem::kInvalidValue;
  }
  const size_t size = openers_at(memory->lead, memory->bytes) + page_bytes();
  if (::ftruncate(memory->fd, static_cast<off_t>(size)) != 0) return Problem::kOutOfMemory;
  {
    const std::lock_guard lock(mutex_);
    if (const auto known = memory_.find(memory->base); known != memory_.end()) {
      known->second.exported = true;
    }
  }
  const HandleOf about{kMagic, ::getpid(), memory->fd, memory->device, memory->lead, memory->bytes};
  handle = {};
  std::memcpy(handle.data(), &about, sizeof(about));
  const std::lock_guard lock(mutex_);
  if (repeat_handles_) handle = last_handle_;
  last_handle_ = handle;
  return Problem::kNone;
}

Problem FakeGpus::open_handle(const IpcHandle& handle, unsigned flags, uintptr_t& base) {
  HandleOf about{};
  std::memcpy(&about, handle.data(), sizeof(about));
  if (flags != 1 || about.magic != kMagic) return Problem::kInvalidValue;
  if (current().empty() || about.pid == ::getpid()) return Problem::kInvalidContext;
  const int used_on = current().back();
  const std::lock_guard lock(mutex_);
  for (const auto& [known, memory] : memory_) {
    if (memory.owner == about.pid && memory.owners_fd == about.fd && memory.used_on == used_on) {
      return Problem::kAlreadyMapped;
    }
  }
  const std::string path = "/proc/" + std::to_string(about.pid) + "/fd/" + std::to_string(about.fd);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return Problem::kInvalidHandle;
  const size_t mapped = whole_pages(kLead + about.bytes);
  const int kind = wrongly_ ? MAP_SHARED | MAP_ANONYMOUS : lose_writes_ ? MAP_PRIVATE : MAP_SHARED;
  void* address = ::mmap(nullptr, mapped, PROT_NONE, kind, wrongly_ ? -1 : fd,
                         wrongly_ ? 0 : static_cast<off_t>(about.lead));
  if (address == MAP_FAILED ||
      !change_opener(fd, openers_at(about.lead, about.bytes), 0, ::getpid())) {
    ::close(fd);
    return Problem::kOutOfMemory;
  }
  base = reinterpret_cast<uintptr_t>(address) + kLead;
  memory_[base] = {Kind::kDevice, about.device, base,     about.bytes, fd,
                   about.lead,    about.pid,    about.fd, used_on};
  ++opened_by_us_;
  return Problem::kNone;
}

Problem FakeGpus::close_handle(uintptr_t base) {
  std::unique_lock lock(mutex_);
  const auto found = memory_.find(base);
  if (found == memory_.end() || found->second.owner == 0) return Problem::kInvalidValue;
  changed_.wait(lock, [&] {
    return lost_ || std::none_of(streams_.begin(), streams_.end(), [&](const auto& entry) {
             return entry.second.device == found->second.used_on && !entry.second.work.empty();
           });
  });
  const Memory& memory = found->second;
  ::munmap(reinterpret_cast<void*>(base - kLead), whole_pages(kLead + memory.bytes));
  change_opener(memory.fd, openers_at(memory.lead, memory.bytes), ::getpid(), 0);
  ::close(memory.fd);
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

Problem FakeGpus::export_memory(uintptr_t address, size_t bytes, int& fd, size_t& offset) {
  const std::lock_guard lock(mutex_);
  for (const auto& [base, memory] : memory_) {
    const uintptr_t begin = memory.from_pool ? pool_begin_ : memory.base - lead_of(memory.kind);
    if (memory.kind != Kind::kDevice || address < begin ||
        address + bytes > begin + whole_pages(memory.base - begin + memory.bytes)) {
      continue;
    }
    const std::string path = "/proc/self/fd/" + std::to_string(memory.fd);
    fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    offset = memory.lead + (address - begin);
    return fd >= 0 ? Problem::kNone : Problem::kOutOfMemory;
  }
  return Problem::kInvalidValue;
}

void FakeGpus::on_flush(void (*hook)()) { on_flush_ = hook; }

void FakeGpus::flushed() {
  if (const auto hook = on_flush_.load()) hook();
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
    if (memory.kind != Kind::kDevice || memory.from_pool) continue;
    ::mprotect(reinterpret_cast<void*>(base - kLead), whole_pages(kLead + memory.bytes),
               open ? PROT_READ | PROT_WRITE : PROT_NONE);
  }
  if (pool_used_ > 0) {
    ::mprotect(reinterpret_cast<void*>(pool_begin_), kPool,
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
extern "C" __attribute__((visibility("default"))) void fake_gpu_open_wrongly(int wrong) {
  kvxfer::fake::FakeGpus::instance().open_wrongly(wrong != 0);
}
extern "C" __attribute__((visibility("default"))) uint64_t fake_gpu_opened() {
  return kvxfer::fake::FakeGpus::instance().opened();
}
extern "C" __attribute__((visibility("default"))) uint64_t fake_gpu_early_frees() {
  return kvxfer::fake::FakeGpus::instance().early_frees();
}
extern "C" __attribute__((visibility("default"))) void fake_gpu_adjacent(int adjacent) {
  kvxfer::fake::FakeGpus::instance().adjacent(adjacent != 0);
}
extern "C" __attribute__((visibility("default"))) void fake_gpu_on_flush(void (*hook)()) {
  kvxfer::fake::FakeGpus::instance().on_flush(hook);
}
extern "C" __attribute__((visibility("default"))) void fake_gpu_damage() {
  kvxfer::fake::FakeGpus::instance().damage();
}
// As a peer-memory module does: which descriptor is behind memory of a device, and where in it an
// address is. The descriptor is the caller's. -1: that is no memory of a device.
extern "C" __attribute__((visibility("default"))) int fake_gpu_peer_memory(uintptr_t address,
                                                                           size_t bytes, int* fd,
                                                                           size_t* offset) {
  const auto problem =
      kvxfer::fake::FakeGpus::instance().export_memory(address, bytes, *fd, *offset);
  return problem == kvxfer::fake::Problem::kNone ? 0 : -1;
}
