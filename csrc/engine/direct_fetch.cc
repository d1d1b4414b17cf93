// The consumer's side of the direct path: caches that peers may write into, and the fence behind
// which they don't any more.

#include <algorithm>
#include <set>
#include <utility>

#include "engine/core.h"

namespace kvxfer {
namespace {

// A producer that is alive says that it has stopped as soon as its adapter has: who is silent for
// this share of the heartbeat time-out is not waited for any longer.
constexpr double kFenceShare = 0.2;

// At least: no run spans two groups of blocks whose numbers are not neighbours, or two memories
// that do not touch.
uint64_t fewest_runs(const Part& part) {
  const Cache& cache = *part.fetch->cache;
  const auto& blocks = part.fetch->spec.table.blocks;
  uint64_t groups = 1;
  for (uint64_t i = 1; i < blocks_used(part); ++i) {
    groups += blocks[i] != blocks[i - 1] + 1 && blocks[i] + 1 != blocks[i - 1];
  }
  std::set<const std::byte*> memories;
  for (const uint32_t layer : part.spec.layers) {
    for (uint32_t plane = 0; plane < cache.layout.planes.size(); ++plane) {
      const auto after = std::upper_bound(
          cache.memory.begin(), cache.memory.end(), cache.layout.view(layer, plane).data,
          [](const std::byte* at, const auto& memory) { return at < memory.data(); });
      memories.insert(std::prev(after)->data());
    }
  }
  uint64_t apart = 0;
  const std::byte* end = nullptr;
  for (const auto& memory : cache.memory) {
    if (!memories.contains(memory.data())) continue;
    apart += memory.data() != end;
    end = memory.data() + memory.size();
  }
  return groups * apart;
}

// Ends the connections of those that a fence has waited for long enough: at `last` whoever it is,
// since an adapter that fails over, or has much to send, takes its time.
void check_fence_later(AgentCore& core, const std::shared_ptr<FetchState>& fetch, TimePoint last) {
  const Duration share = to_duration(kFenceShare * core.options.heartbeat_timeout);
  const Duration silence = std::max(share, to_duration(2 * core.options.heartbeat_interval));
  const TimePoint next = std::min(Clock::now() + share, last);
  set_timer(core, fetch->timer, next, [&core, fetch, last, silence] {
    const TimePoint now = Clock::now();
    std::set<std::shared_ptr<Peer>> late;
    for (const SlotInfo& slot : core.slots) {
      if (slot.fenced != fetch) continue;
      const auto found = core.peers.find(slot.peer);
      if (found == core.peers.end()) continue;
      if (now >= last || now - found->second->last_heard.load() >= silence) {
        late.insert(found->second);
      }
    }
    if (now < last) check_fence_later(core, fetch, last);
    for (const auto& peer : late) {
      drop_peer(
          core, peer,
          {StatusCode::kPeerLost, "lost '" + peer->name +
                                      "': it did not say that it writes no more into the blocks "
                                      "of a fetch that has ended"});
    }
  });
}

// Runs on the registrar, without the mutex.
void start_waiting(AgentCore& core, Peer& peer, const std::shared_ptr<Cache>& cache,
                   Registered made) {
  if (!made.memory) {
    made.problem = "the cache cannot be registered: " + made.problem;
  } else if (const size_t bytes = made.memory->keys().size(); bytes > wire::kMaxKeys) {
    made = {nullptr, "the cache's keys would take " + std::to_string(bytes) + " bytes"};
  }
  Guard guard(core);
  if (const auto entry = peer.targets.find(cache->id); entry != peer.targets.end()) {
    entry->second = std::move(made);
  }
  // Where the peer was lost meanwhile, there are none: they have failed with it.
  std::vector<std::shared_ptr<Part>> waiting;
  std::erase_if(peer.pending, [&](const auto& part) {
    if (!part->asks_direct || part->fetch->cache != cache) return false;
    waiting.push_back(part);
    return true;
  });
  for (const auto& part : waiting) {
    if (!part->fetch->ending) start_part(core, part);
  }
  grant_slots(core);
}

// Unless that is done, or under way. False: the agent is closing.
bool register_target(AgentCore& core, const std::shared_ptr<Peer>& peer,
                     const std::shared_ptr<Cache>& cache) {
  if (!peer->targets.try_emplace(cache->id).second) return true;
  if (pin_cache(core, cache, peer, Link::DirectUse::kTarget, [&core, peer, cache](Registered made) {
        start_waiting(core, *peer, cache, std::move(made));
      })) {
    return true;
  }
  peer->targets.erase(cache->id);
  return false;
}

}  // namespace

bool may_go_direct(const AgentCore& core, Part& part) {
  const FetchSpec& spec = part.fetch->spec;
  const Peer& peer = *part.peer;
  if (core.options.path == Path::kStaged) {
    part.path_why = "path is set to staged";
  } else if (!peer.link->direct()) {
    part.path_why = std::string(peer.link->transport()) + " has no direct path";
  } else if (!peer.direct) {
    part.path_why = "'" + peer.name + "' has path set to staged, or is of an older release";
  } else if (part.fetch->cache->gpu && core.options.gpu_direct == GpuDirect::kOff) {
    part.path_why = "the cache is in GPU memory, and gpudirect is set to off";
  } else if (spec.codec.codec != Codec::kRaw) {
    part.path_why = std::string("codec ") + codec_name(spec.codec.codec) + " needs staging";
  } else if (spec.table.blocks.size() > wire::kMaxBlocks) {
    part.path_why = "more than " + std::to_string(wire::kMaxBlocks) + " blocks";
  } else if (core.options.path == Path::kAuto && !spec.gpu_direct_only &&
             part.memory_bytes / kAutoRun < fewest_runs(part)) {
    part.path_why = "runs of less than " + std::to_string(kAutoRun >> 10) +
                    " KiB on average: packing is faster";
  } else {
    return true;
  }
  return false;
}

bool stages_meanwhile(AgentCore& core, Part& part) {
  const auto& cache = part.fetch->cache;
  if (core.options.path != Path::kAuto || !cache->gpu || part.fetch->spec.gpu_direct_only ||
      !cache->gpu->trials.ahead(core.options.gpu_direct, *part.peer->link,
                                Link::DirectUse::kTarget)) {
    return false;
  }
  register_target(core, part.peer, cache);
  part.asks_direct = false;
  part.path_why = "whether adapters reach this GPU's memory is being tried";
  return true;
}

void register_and_start(AgentCore& core, const std::shared_ptr<Part>& part) {
  send_renew(*part);
  // Meanwhile it fails with the peer, as one does that waits for HELLO.
  part->peer->pending.push_back(part);
  if (register_target(core, part->peer, part->fetch->cache)) return;
  fail_fetch(core, part->fetch,
             {StatusCode::kClosed, "agent '" + core.options.name + "' is closing"});
}

void watch_fence(AgentCore& core, const std::shared_ptr<FetchState>& fetch) {
  check_fence_later(core, fetch, Clock::now() + to_duration(core.options.heartbeat_timeout));
}

}  // namespace kvxfer
