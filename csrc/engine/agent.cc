#include "kvxfer/agent.h"

#include <algorithm>
#include <chrono>
#include <set>
#include <utility>

#include "base/event_loop.h"
#include "engine/core.h"
#include "layout/common_runs.h"

namespace kvxfer {
namespace {

// What does not fit the protocol's limits is refused here: a peer would drop the link for it.
void check_announceable(const CacheLayout& layout) {
  const auto require = [](bool fine, const std::string& what, size_t limit) {
    if (!fine) {
      throw Error(StatusCode::kInvalid, "a cache's " + what + " at most " + std::to_string(limit));
    }
  };
  require(layout.layers.size() <= wire::kMaxLayers, "layers may be", wire::kMaxLayers);
  require(layout.planes.size() <= wire::kMaxPlanes, "planes may be", wire::kMaxPlanes);
  require(layout.model.size() <= wire::kMaxName, "model name may have bytes,", wire::kMaxName);
  size_t names = 0;
  for (const std::string& layer : layout.layers) {
    require(layer.size() <= wire::kMaxName, "layer names may have bytes,", wire::kMaxName);
    names += layer.size();
  }
  for (const PlaneSpec& plane : layout.planes) {
    require(plane.name.size() <= wire::kMaxName, "plane names may have bytes,", wire::kMaxName);
  }
  require(names <= kMaxMessage / 4, "layer names together may have bytes,", kMaxMessage / 4);
}

constexpr Duration kGpuSlack = std::chrono::seconds(1), kMostFreeing = std::chrono::seconds(5);

// Threads of a device whose driver does not come back use it.
void keep_for_good(std::shared_ptr<AgentCore> core) {
  static auto* mutex = new std::mutex;
  static auto* kept = new std::vector<std::shared_ptr<AgentCore>>;
  const std::lock_guard lock(*mutex);
  kept->push_back(std::move(core));
}

AgentMemory memory_of(const std::shared_ptr<Arena>& arena) {
  return {arena, {arena->slot(0), arena->bytes()}};
}

}  // namespace

Agent::Agent(const AgentOptions& options) : core_(std::make_shared<AgentCore>(options)) {
  AgentCore& core = *core_;
  core.io->control()->set_tick([&core] {
    Guard guard(core);
    core.timers.run_due(Clock::now());
    return core.sleeping_until = core.timers.next();
  });
}

Agent::~Agent() { close(); }

CacheId Agent::register_cache(const CacheLayout& layout, bool on_gpu) {
  layout.validate();
  check_announceable(layout);
  AgentCore& core = *core_;
  core.check_fork();
  auto cache = std::make_shared<Cache>();
  if (on_gpu) {
    cache->place = find_gpu(layout);
    cache->gpu = core.gpus.get(*cache->place, core.options);
    try {
      cache->gpu_address = cache->place->runtime->pci_address(cache->place->device);
    } catch (const Error&) {
      // Only RDMA ports are chosen by it.
    }
    core.gpu_gate.start();
  }
  Guard guard(core);
  core.check_open();
  const bool may_go_direct = !on_gpu || core.options.gpu_direct != GpuDirect::kOff;
  if (may_go_direct && !core.registrar && core.options.path != Path::kStaged) {
    core.registrar = std::make_shared<ThreadPool>(1, "kvx-pin");
  }
  for (cache->id = 1; core.caches.contains(cache->id);) ++cache->id;
  cache->layout = layout;
  std::set<const std::byte*> borders;  // adapters register allocation by allocation
  if (on_gpu) {
    for (const auto& [address, base] : cache->place->allocations) {
      borders.insert(reinterpret_cast<const std::byte*>(base));
    }
  }
  cache->memory = extents(layout, borders);
  for (uint32_t i = 0; i < layout.layers.size(); ++i) cache->layer_index[layout.layers[i]] = i;
  core.caches[cache->id] = cache;
  if (on_gpu) {
    for (const auto& [peer_id, peer] : core.peers) tell_of_gpus(core, *peer);
  }
  return cache->id;
}

void Agent::unregister_cache(CacheId id) {
  AgentCore& core = *core_;
  core.check_fork();
  Guard guard(core);
  while (true) {
    const auto found = core.caches.find(id);
    if (found == core.caches.end())
      throw Error(StatusCode::kInvalid, "the cache is not registered with this agent");
    const std::shared_ptr<Cache> cache = found->second;
    if (cache->users > 0) {
      throw Error(StatusCode::kInvalid,
                  "the cache is in use by " + std::to_string(cache->users) +
                      " offers and fetches: release or cancel them, wait until they have ended, "
                      "then unregister it");
    }
    // The id is used again: then it is announced anew.
    for (const auto& [peer_id, peer] : core.peers) {
      peer->announced.erase(id);
      take_registered(*peer, id);
      std::erase_if(peer->orders, [&](const auto& entry) { return entry.first.local == id; });
    }
    if (cache->pinned == 0) {
      core.caches.erase(found);
      return;
    }
    // Meanwhile it may be used anew, or be unregistered by another thread.
    core.peers_changed.wait_for(guard.lock(), std::chrono::milliseconds(100));
  }
}

std::vector<std::string> Agent::gpus() const {
  core_->check_fork();
  std::set<std::string> addresses;
  Guard guard(*core_);
  for (const auto& [id, cache] : core_->caches) {
    if (cache->gpu) addresses.insert(cache->gpu_address);
  }
  return {addresses.begin(), addresses.end()};
}

IoThreads& Agent::io() {
  core_->check_fork();
  Guard guard(*core_);
  core_->check_open();
  return *core_->io;
}

int Agent::arena_fd() {
  core_->check_fork();
  Guard guard(*core_);
  core_->check_open();
  ensure_arena(*core_);
  return core_->arena->fd();
}

uint64_t Agent::arena_bytes() const {
  core_->check_fork();
  Guard guard(*core_);
  return core_->arena ? core_->arena->bytes() : 0;
}

AgentMemory Agent::arena() {
  core_->check_fork();
  Guard guard(*core_);
  core_->check_open();
  ensure_arena(*core_);
  return memory_of(core_->arena);
}

AgentMemory Agent::staging() {
  core_->check_fork();
  Guard guard(*core_);
  core_->check_open();
  ensure_staging(*core_);
  return memory_of(core_->staging);
}

int Agent::event_fd() {
  core_->check_fork();
  Guard guard(*core_);
  return core_->events.fd();
}

std::vector<uint64_t> Agent::poll() {
  core_->check_fork();
  Guard guard(*core_);
  return core_->events.drain();
}

AgentStats Agent::stats() const {
  const AgentCore& core = *core_;
  core.check_fork();
  Guard guard(*core_);
  AgentStats stats = core.counters;
  stats.offers = core.offers.size();
  stats.fetches = core.fetches.size();
  stats.peers = core.peers.size();
  for (const auto& [id, peer] : core.peers) stats.serving += peer->serves.size();
  stats.held_bytes = core.held;
  if (core.arena) {
    stats.slots = core.arena->num_slots();
    stats.free_slots = core.arena->num_free();
  }
  for (const SlotInfo& slot : core.slots)
    stats.quarantined_slots += slot.state == SlotInfo::kQuarantined;
  return stats;
}

Trace Agent::trace() const {
  core_->check_fork();
  return core_->recorder.trace();
}

AgentMetrics Agent::metrics() const {
  core_->check_fork();
  return core_->recorder.metrics();
}

UnfinishedGpus Agent::close() {
  AgentCore& core = *core_;
  if (core.fork_generation != fork_generation()) return {};
  const std::lock_guard once(core.closing);
  {
    Guard guard(core);
    if (core.closed) return {};
    core.closed = true;
    const Status closing{StatusCode::kClosed, "agent '" + core.options.name + "' was closed"};
    const auto offers = core.offers;
    for (const auto& [generation, offer] : offers) end_offer(core, offer, closing);
    const auto fetches = core.fetches;
    for (const auto& [handle, fetch] : fetches) fail_fetch(core, fetch, closing);
    const auto peers = core.peers;
    for (const auto& [id, peer] : peers) {
      drop_peer(core, peer, closing);
      if (!peer->link) core.peers.erase(id);
    }
    // A peer that is stopped never lets go; it is not waited for longer than this. Adapters do.
    const auto wait = [&](int milliseconds, bool direct_only) {
      core.peers_changed.wait_for(guard.lock(), std::chrono::milliseconds(milliseconds), [&] {
        return std::none_of(core.peers.begin(), core.peers.end(), [&](const auto& entry) {
          return !direct_only || !entry.second->targets.empty() || !entry.second->sources.empty();
        });
      });
    };
    wait(500, false);
    wait(2500, true);
    clear_timer(core, core.heartbeat);
  }
  core.gpus.hurry();
  const Duration gpu_limit = to_duration(core.options.gpu_timeout);
  // Longer than the last chunk has, unless a driver's call does not come back.
  const TimePoint limit = Clock::now() + gpu_limit + kGpuSlack;
  bool through = core.gpu_gate.stop_until(limit);
  core.pool->stop();  // runs the jobs that were queued: all blocks are out of use after it
  if (!core.gpus.close(std::max<TimePoint>(limit, Clock::now() + kGpuSlack))) through = false;
  core.io->control()->set_tick(nullptr);
  core.io->stop();
  if (core.registrar) core.registrar->stop();
  {
    Guard guard(core);
    // Without these, adapters that have not let go reach no cache of ours.
    for (const auto& [id, peer] : core.peers) {
      take_registered(*peer, std::nullopt);
      abandon_exposed(*peer);
    }
    if (through) {  // or threads may be looking at them
      for (const auto& [handle, fetch] : core.fetches) {
        for (const auto& part : fetch->parts) part->target.reset();
      }
    }
    for (uint32_t slot = 0; slot < core.slots.size(); ++slot) {
      if (core.slots[slot].fenced) free_slot(core, slot);
    }
    core.peers.clear();
    core.hungry.clear();
    core.serve_queue.clear();
    // Of links whose loops have stopped before they could say so. What an adapter may yet send of
    // these blocks stays registered until then, and is of no offer any more.
    for (const auto& [token, write] : std::exchange(core.writing, {})) {
      if (!write.staging_slot) {
        --write.serve->offer->reading;
        release_if_unread(core, *write.serve->offer);
      }
      land_flight(core, write.serve);
    }
    if (through) {
      core.staging.reset();
      core.arena.reset();
      core.slots.clear();
    } else {
      keep_for_good(core_);
      const std::string why = "agent '" + core.options.name +
                              "' was closed, but a GPU does not come back: until the process ends "
                              "it has the blocks";
      for (const auto& [handle, fetch] : std::map(core.fetches)) leave_fetch(core, fetch, why);
      for (const auto& [handle, offer] : core.unreleased) leave_offer(*offer, why);
    }
  }
  return core.gpus.free(Clock::now() + std::min<Duration>(gpu_limit, kMostFreeing));
}

}  // namespace kvxfer
