#include "engine/gpu_device.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "engine/core.h"
#include "kvxfer/status.h"
#include "pack/gpu_lane.h"

namespace kvxfer {
namespace {

// The last byte that a view reaches.
const std::byte* last_byte(const CacheLayout& layout, const PlaneView& view, uint32_t content) {
  const auto far = [](uint32_t extent, int64_t stride) { return (int64_t{extent} - 1) * stride; };
  return view.data + far(layout.num_blocks, view.block_stride) +
         far(layout.num_heads, view.head_stride) + far(layout.block_size, view.token_stride) +
         far(content, view.content_stride) + element_bytes(layout.element) - 1;
}

std::string device_name(const GpuRuntime& runtime, int device) {
  return "device " + std::to_string(device) + " of " + runtime.name();
}

}  // namespace

GpuPlace find_gpu(const CacheLayout& layout) {
  GpuPlace place;
  std::vector<std::shared_ptr<GpuRuntime>> runtimes;
  std::string why_not;
  for (const GpuVendor vendor : {GpuVendor::kNvidia, GpuVendor::kAmd}) {
    GpuSearch search = gpu_runtime(vendor);
    if (search.runtime) runtimes.push_back(std::move(search.runtime));
    why_not += (why_not.empty() ? "" : "; ") + search.why_not;
  }
  if (runtimes.empty()) {
    throw Error(StatusCode::kNoResources,
                "the cache is on a GPU, whose runtime can't be used: " + why_not);
  }
  std::string first;
  const auto look = [&](const std::byte* address, const std::string& where) {
    for (const auto& runtime : runtimes) {
      const auto memory = runtime->find_memory(address);
      if (!memory || memory->kind == GpuMemory::Kind::kHost) continue;
      if (!place.runtime) {
        place.runtime = runtime;
        place.device = memory->device;
        first = where;
      } else if (place.runtime != runtime || place.device != memory->device) {
        throw Error(StatusCode::kInvalid,
                    where + " is on " + device_name(*runtime, memory->device) + ", " + first +
                        " on " + device_name(*place.runtime, place.device) +
                        ": a cache lies on one device; make one for each, with the layers there");
      }
      const auto known =
          std::find_if(place.allocations.begin(), place.allocations.end(),
                       [&](const auto& allocation) { return allocation.second == memory->base; });
      if (known == place.allocations.end()) place.allocations.emplace_back(address, memory->base);
      return;
    }
    throw Error(StatusCode::kInvalid, where + " should be on a GPU, but " +
                                          runtimes.front()->name() +
                                          " knows no device memory there: was it freed?");
  };
  for (size_t layer = 0; layer < layout.layers.size(); ++layer) {
    for (size_t plane = 0; plane < layout.planes.size(); ++plane) {
      const std::string where =
          "layer '" + layout.layers[layer] + "', plane '" + layout.planes[plane].name + "'";
      const PlaneView& view = layout.view(layer, plane);
      look(view.data, where);
      look(last_byte(layout, view, layout.planes[plane].content), "the end of " + where);
    }
  }
  return place;
}

void check_allocations(const GpuPlace& place) {
  for (const auto& [address, base] : place.allocations) {
    const auto memory = place.runtime->find_memory(address);
    if (memory && memory->kind != GpuMemory::Kind::kHost && memory->device == place.device &&
        memory->base == base) {
      continue;
    }
    throw Error(StatusCode::kInvalid,
                "memory of the cache on " + device_name(*place.runtime, place.device) +
                    " was freed: it must stay until the cache is unregistered");
  }
}

GpuDevice::GpuDevice() = default;
GpuDevice::~GpuDevice() {
  static_cast<void>(scratch.release());  // nobody has closed the agent, as after a fork
}

std::shared_ptr<GpuArena> GpuDevice::arena(const AgentOptions& options, wire::GpuArena& told) {
  const std::lock_guard lock(making_arena_);
  if (!arena_) {
    const auto slots = static_cast<uint32_t>(options.arena_bytes / options.slot_bytes);
    arena_ = std::make_shared<GpuArena>(runtime, packer->device(), slots, options.slot_bytes);
  }
  told = arena_->tell(*packer);
  return arena_;
}

bool GpuDevice::given_up() const {
  const std::lock_guard lock(packer_mutex_);
  return packer ? packer->given_up() : was_given_up_;
}

void GpuDevice::free() {
  arena_.reset();
  try {
    const CurrentDevice current(*runtime, packer->device());
    scratch.reset();
  } catch (const Error&) {
    // The device is gone, and its memory with it.
  }
  std::unique_ptr<GpuPacker> dropped;
  const std::lock_guard lock(packer_mutex_);
  was_given_up_ = packer->given_up();
  dropped = std::move(packer);
}

std::shared_ptr<GpuDevice> GpuDevices::get(const GpuPlace& place, const AgentOptions& options) {
  const std::pair key(place.runtime->vendor(), place.device);
  const auto check_open = [&] {
    if (closed_) throw Error(StatusCode::kClosed, "agent '" + options.name + "' is closed");
  };
  const std::lock_guard making(making_);
  {
    const std::lock_guard lock(mutex_);
    check_open();
    if (const auto known = devices_.find(key); known != devices_.end()) return known->second;
  }
  auto device = std::make_shared<GpuDevice>();
  device->runtime = place.runtime;
  const auto limit =
      std::chrono::duration_cast<Duration>(std::chrono::duration<double>(options.gpu_timeout));
  device->packer = std::make_unique<GpuPacker>(*place.runtime, place.device,
                                               code_objects(place.runtime->vendor()),
                                               options.slot_bytes, kGpuLanes, limit);
  const std::string name = "kvx-gpu" + std::to_string(place.device);
  device->pool = std::make_unique<ThreadPool>(kGpuLanes, name);
  device->frees = std::make_unique<ThreadPool>(1, name + "-free");
  const std::lock_guard lock(mutex_);
  check_open();
  devices_[key] = device;
  return device;
}

void GpuDevices::hurry() {
  const std::lock_guard lock(mutex_);
  for (const auto& [key, device] : devices_) {
    device->packer->hurry();
  }
}

bool GpuDevices::close(TimePoint deadline) {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  bool all = true;
  for (const auto& [key, device] : devices_) {
    if (device->pool->stop_until(deadline)) continue;
    device->packer->give_up();
    all = false;
  }
  return all;
}

UnfinishedGpus GpuDevices::free(TimePoint deadline) {
  const auto devices = std::exchange(devices_, {});
  UnfinishedGpus unfinished;
  for (const auto& [key, device] : devices) {
    if (!device->given_up()) {
      device->frees->submit([device = device] { device->free(); });
      continue;
    }
    ++unfinished.given_up;
    if (device->arena_) device->arena_->abandon();
  }
  for (const auto& [key, device] : devices) {
    if (!device->frees->stop_until(deadline)) ++unfinished.busy;
  }
  return unfinished;
}

std::shared_ptr<GpuEvent> stream_event(const Cache& cache, void* stream) {
  if (!cache.place) {
    if (stream == nullptr) return nullptr;
    throw Error(StatusCode::kInvalid,
                "a stream was given, but the cache is in the host's memory: leave it out");
  }
  auto event = std::make_shared<GpuEvent>(cache.place->runtime, cache.place->device, stream);
  return event->happened() ? nullptr : event;
}

std::shared_ptr<GpuEvent> first_event(AgentCore& core, CacheId cache, void* stream, bool ready) {
  std::shared_ptr<Cache> found;
  {
    const Guard guard(core);
    const auto known = core.caches.find(cache);
    if (known == core.caches.end()) return nullptr;  // which is said where it is used
    found = known->second;
  }
  if (found->place) check_allocations(*found->place);
  return ready ? stream_event(*found, stream) : nullptr;
}

}  // namespace kvxfer
