// Caches in GPU memory that adapters reach: how they are registered, and whether that works.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <exception>
#include <map>
#include <utility>

#include "engine/core.h"
#include "pack/gpu_lane.h"

namespace kvxfer {
namespace {

// Of scratch memory that a registration is tried on, and the part of it that is registered: a part
// that begins and ends within pages, and has the end of a large page in it, as a tensor's has that
// an allocator cut out of a larger piece. What is at the begin is registered, too, for what is
// exported begins with the first of several arrays: so the part is many pages and some bytes into
// that. A registration that forgets either fails there.
constexpr size_t kScratch = 5u << 20, kBegin = (2u << 20) - 12'848, kBytes = (2u << 20) + 30'000;
constexpr size_t kHead = 5'000;
constexpr double kTrySeconds = 5, kProbeSeconds = 2, kReadBackSeconds = 1;

const char* name_of(GpuDirect way) {
  return way == GpuDirect::kDmaBuf ? "by dma-buf" : "by peer memory";
}

// What of an allocation is registered: from the first span in it to the last.
struct Exported {
  uint64_t begin = UINT64_MAX, end = 0;
  DmaBuf dmabuf;  // its descriptor lasts until all of them are registered
};

// By the base of the allocation that all of it lies in. Throws where that is not one, and where it
// is not memory of a device: managed memory moves.
uint64_t allocation_of(GpuRuntime& runtime, std::span<std::byte> memory) {
  const auto found = runtime.find_memory(memory.data());
  if (!found || found->kind != GpuMemory::Kind::kDevice) {
    throw Error(StatusCode::kNoResources,
                !found ? "memory of the cache was freed"
                       : "the memory is managed, or the host's: adapters reach only what stays "
                         "on a device");
  }
  const uint64_t before = reinterpret_cast<uintptr_t>(memory.data()) - found->base;
  if (memory.size() > found->bytes - before) {
    throw Error(StatusCode::kNoResources,
                "an array of the cache reaches over the end of an allocation of " +
                    std::to_string(found->bytes) +
                    " bytes: let the allocator make it in one (torch: without "
                    "expandable_segments)");
  }
  return found->base;
}

std::shared_ptr<DirectMemory> register_spans(GpuRuntime& runtime, GpuDirect way, Link& link,
                                             std::span<const std::span<std::byte>> memory,
                                             Link::DirectUse use) {
  std::map<uint64_t, Exported> exports;
  std::vector<Exported*> exported;
  for (const auto& part : memory) {
    Exported& all = exports[allocation_of(runtime, part)];
    const auto begin = reinterpret_cast<uintptr_t>(part.data());
    all.begin = std::min<uint64_t>(all.begin, begin);
    all.end = std::max<uint64_t>(all.end, begin + part.size());
    exported.push_back(&all);
  }
  if (way == GpuDirect::kDmaBuf) {
    for (auto& [base, all] : exports) {
      all.dmabuf = runtime.export_dmabuf(all.begin, all.end - all.begin);
    }
  }
  std::vector<DirectSpan> spans;
  for (size_t i = 0; i < memory.size(); ++i) {
    DirectSpan& span = spans.emplace_back(DirectSpan{memory[i], true});
    if (way != GpuDirect::kDmaBuf) continue;
    span.dmabuf = exported[i]->dmabuf.fd.get();
    span.offset = exported[i]->dmabuf.offset +
                  (reinterpret_cast<uintptr_t>(memory[i].data()) - exported[i]->begin);
  }
  auto made = link.register_memory(spans, use);
  if (!made)
    throw Error(StatusCode::kNoResources, std::string(link.transport()) + " registers none");
  return made;
}

// A registration that is worse than none.
struct WrongBytes : Error {
  explicit WrongBytes(const std::string& what)
      : Error(StatusCode::kNoResources,
              what + ": GPUDirect is off for this device and way, and these adapters") {}
};

std::byte pattern(size_t adapter, size_t i) {
  return static_cast<std::byte>((i * 167 + adapter * 59 + (i >> 8) * 13 + 1) & 0xff);
}

// Throws what went wrong first when all have read that can.
void read_back(const DirectMemory& memory, const std::byte* from) {
  std::array<std::byte, 8> bytes;
  std::exception_ptr failure;
  for (size_t i = 0; i < memory.adapters(); ++i) {
    try {
      memory.get(i, from, bytes, kReadBackSeconds);
    } catch (const std::exception&) {
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

// Where in the scratch memory adapters write or read: at the ends of what is registered, and across
// the large page's.
std::array<size_t, 5> places() {
  constexpr size_t kProbe = DirectMemory::kProbeBytes;
  return {0, kHead - kProbe, kBegin, (2u << 20) - kProbe / 2, kBegin + kBytes - kProbe};
}

// Has an adapter write at those places, and compares all of the scratch memory with what it should
// be then.
void try_writes(GpuRuntime& runtime, int device, const DirectMemory& memory, size_t adapter,
                std::vector<std::byte>& expected, GpuLane& lane) {
  auto* const scratch = reinterpret_cast<std::byte*>(lane.slot());
  for (const size_t place : places()) {
    const auto bytes = std::span(expected).subspan(place, DirectMemory::kProbeBytes);
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = pattern(adapter, place + i);
    memory.put(adapter, scratch + place, bytes, kProbeSeconds);
  }
  runtime.settle_writes(device, [&] { read_back(memory, scratch + kBegin); });
  runtime.copy(lane.host_slot(), scratch, kScratch, lane.stream());
  lane.finish();
  const auto wrong =
      std::mismatch(expected.begin(), expected.end(), lane.host_slot()).first - expected.begin();
  if (static_cast<size_t>(wrong) == kScratch) return;
  throw WrongBytes("what RDMA device '" + memory.adapter_name(adapter) +
                   "' wrote into scratch memory is not there, or elsewhere: byte " +
                   std::to_string(wrong) + " of " + std::to_string(kScratch) + " is wrong");
}

void try_reads(const DirectMemory& memory, size_t adapter, const std::vector<std::byte>& expected,
               const std::byte* scratch) {
  for (const size_t place : places()) {
    std::array<std::byte, DirectMemory::kProbeBytes> got = {};
    memory.get(adapter, scratch + place, got, kProbeSeconds);
    if (!std::equal(got.begin(), got.end(), &expected[place])) {
      throw WrongBytes("RDMA device '" + memory.adapter_name(adapter) +
                       "' read other bytes of scratch memory than are there");
    }
  }
}

// Fills the lane's scratch memory, and has each adapter write into it or read from it. Throws with
// what is wrong.
void exercise(GpuRuntime& runtime, int device, GpuDirect way, Link& link, Link::DirectUse use,
              GpuLane& lane) {
  auto* const scratch = reinterpret_cast<std::byte*>(lane.slot());
  std::vector<std::byte> expected(kScratch);
  for (size_t i = 0; i < kScratch; ++i) expected[i] = pattern(99, i);
  std::memcpy(lane.host_slot(), expected.data(), kScratch);
  runtime.copy(scratch, lane.host_slot(), kScratch, lane.stream());
  lane.finish();
  const std::array<std::span<std::byte>, 2> parts = {
      {{scratch, kHead}, {scratch + kBegin, kBytes}}};
  const auto memory = register_spans(runtime, way, link, parts, use);
  for (size_t adapter = 0; adapter < memory->adapters(); ++adapter) {
    if (use == Link::DirectUse::kTarget) {
      try_writes(runtime, device, *memory, adapter, expected, lane);
    } else {
      try_reads(*memory, adapter, expected, scratch);
    }
  }
}

// Whether a way works on this device, tried where that is not known. Throws with what is wrong: it
// takes seconds to find that out again, on a thread that others wait for, too, so for a while that
// is taken to last.
void try_way(const AgentCore& core, const Cache& cache, GpuDirect way, Link& link,
             Link::DirectUse use) {
  GpuDevice& gpu = *cache.gpu;
  const GpuTrials::Key key{way, use, link.adapters()};
  if (const auto problem = gpu.trials.find(key)) {
    if (problem->empty()) return;
    throw Error(StatusCode::kNoResources, *problem);
  }
  GpuRuntime& runtime = *gpu.runtime;
  const CurrentDevice current(runtime, cache.place->device);
  try {
    if (!gpu.scratch) {
      static const std::atomic<bool> kHurried = false;
      gpu.scratch = std::make_unique<GpuLane>(
          runtime, kScratch, to_duration(std::min(core.options.gpu_timeout, kTrySeconds)),
          kHurried);
    }
    exercise(runtime, cache.place->device, way, link, use, *gpu.scratch);
    gpu.trials.put(key, "", kNever);
  } catch (const std::exception& error) {  // also std::bad_alloc
    const bool wrong = dynamic_cast<const WrongBytes*>(&error) != nullptr;
    const TimePoint later = Clock::now() + to_duration(core.options.gpu_direct_retry);
    gpu.trials.put(key, error.what(), wrong ? kNever : later);
    if (!gpu.scratch) throw;
    try {  // what was told to the device may still run
      if (!gpu.scratch->stuck()) gpu.scratch->finish();
    } catch (const std::exception&) {
      gpu.scratch->abandon();
    }
    if (gpu.scratch->stuck()) {
      gpu.trials.end(error.what());
      static_cast<void>(gpu.scratch.release());  // freeing it would wait for the device
    }
    throw;
  }
}

}  // namespace

Registered register_gpu(const AgentCore& core, Cache& cache, Link& link, Link::DirectUse use) {
  const GpuDirect asked = core.options.gpu_direct;
  std::string problems;
  for (const GpuDirect way : {GpuDirect::kDmaBuf, GpuDirect::kPeerMemory}) {
    if (asked != GpuDirect::kAuto && asked != way) continue;
    try {
      check_allocations(*cache.place);
      try_way(core, cache, way, link, use);
      const CurrentDevice current(*cache.gpu->runtime, cache.place->device);
      return {register_spans(*cache.gpu->runtime, way, link, cache.memory, use),
              {},
              false,
              name_of(way)};
    } catch (const std::exception& error) {
      problems += (problems.empty() ? "" : "; ") + std::string(name_of(way)) + ": " + error.what();
    }
  }
  throw Error(StatusCode::kNoResources, problems);
}

void settle_writes(const AgentCore& core, const Part& part) {
  const Cache& cache = *part.fetch->cache;
  GpuRuntime& runtime = *cache.gpu->runtime;
  const CurrentDevice current(runtime, cache.place->device);
  const auto read_all = [&] {
    if (!part.target) throw Error(StatusCode::kPeerLost, "the cache is registered no more");
    read_back(*part.target, cache.memory.front().data());
  };
  if (!core.options.digest) {
    // Nothing else would find what the driver's word on the order does not hold for, such as
    // writes that reach the GPU by a link between processors.
    read_all();
    return runtime.settle_writes(cache.place->device, [] {});
  }
  runtime.settle_writes(cache.place->device, [&] {
    try {
      read_all();
    } catch (const Error&) {
      // Such as of an adapter whose port is down now. A digest tells whether the bytes are there.
    }
  });
}

void settle_failed(const FetchState& fetch) {
  const Cache& cache = *fetch.cache;
  GpuRuntime& runtime = *cache.gpu->runtime;
  try {
    const CurrentDevice current(runtime, cache.place->device);
    for (const auto& part : fetch.parts) {
      if (!part->target) continue;  // registered no more
      try {
        read_back(*part->target, cache.memory.front().data());
      } catch (const std::exception&) {
        // The connection has ended, perhaps because of just that adapter.
      }
    }
    runtime.settle_writes(cache.place->device, [] {});
  } catch (const std::exception&) {
    // The device is lost, and what is in its memory with it.
  }
}

}  // namespace kvxfer
