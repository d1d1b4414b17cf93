// Slots of the consumer's arena: who holds them, and who gets the next one.

#include <algorithm>
#include <utility>

#include "engine/core.h"

namespace kvxfer {

void ensure_arena(AgentCore& core) {
  if (core.arena) return;
  core.arena = std::make_unique<Arena>(Arena::kShared, core.options.arena_bytes,
                                       core.options.slot_bytes, core.options.lock_arena);
  core.slots.resize(core.arena->num_slots());
}

void ensure_staging(AgentCore& core) {
  if (core.staging) return;
  const uint64_t slots = 4 * (core.options.threads + core.options.bulk_threads);
  core.staging = std::make_unique<Arena>(Arena::kPrivate, slots * core.options.slot_bytes,
                                         core.options.slot_bytes, core.options.lock_arena);
}

namespace {

// A peer that is slow has at most half of the arena, unless there is no other.
bool may_have_more(const AgentCore& core, const Peer& peer) {
  if (peer.state != Peer::kReady) return true;  // it gets nothing: what it has queued is let go
  if (peer.granted < (core.arena->num_slots() + 1) / 2) return true;
  return std::none_of(core.peers.begin(), core.peers.end(), [&](const auto& entry) {
    const Peer& other = *entry.second;
    return &other != &peer && !other.inbound && other.state == Peer::kReady;
  });
}

}  // namespace

uint32_t window_of(const AgentCore& core, const Part& part) {
  return part.peer->link->one_sided() ? core.options.window : core.options.copied_window;
}

void free_slot(AgentCore& core, uint32_t slot) {
  const SlotInfo freed = std::exchange(core.slots[slot], {});
  if (const auto peer = core.peers.find(freed.peer); peer != core.peers.end()) {
    --peer->second->granted;
  }
  core.arena->give_back(slot);
  if (!freed.fenced) return;
  --freed.fenced->fenced;
  complete(core, freed.fenced);
}

uint32_t grant_slot(AgentCore& core, Part& part) {
  const uint32_t slot = *core.arena->take();
  core.slots[slot] = {SlotInfo::kGranted, part.peer->id, part.id};
  part.slots.push_back(slot);
  ++part.granted;
  ++part.peer->granted;
  return slot;
}

void feed(AgentCore& core, const std::shared_ptr<Part>& part, uint32_t enough) {
  const bool wants = !part->done && !part->fetch->ending && part->wanted > part->granted &&
                     part->slots.size() < enough && part->peer->state == Peer::kReady;
  // On the direct path a slot lets the producer write into the blocks: open_gate() comes back here.
  const bool too_early = part->direct && part->fetch->gated;
  if (!wants || too_early || part->hungry) return;
  part->hungry = true;
  core.hungry.push(part->peer.get(), part);
}

void return_slot(AgentCore& core, const std::shared_ptr<Part>& part, uint32_t slot) {
  std::erase(part->slots, slot);
  free_slot(core, slot);
  // Half a window at a time: every credit message wakes the producer's progress thread.
  feed(core, part, window_of(core, *part) / 2 + 1);
}

void reclaim_granted(AgentCore& core, Part& part, bool exposed) {
  std::erase_if(part.slots, [&](uint32_t slot) {
    const SlotInfo::State state = core.slots[slot].state;
    if (state != SlotInfo::kGranted && state != SlotInfo::kLanded) return false;
    if (exposed && state == SlotInfo::kGranted) {
      core.slots[slot].state = SlotInfo::kQuarantined;
      if (part.direct) {
        core.slots[slot].fenced = part.fetch;
        ++part.fetch->fenced;
      }
    } else {
      free_slot(core, slot);
    }
    return true;
  });
}

void grant_slots(AgentCore& core) {
  std::vector<std::pair<std::shared_ptr<Part>, std::vector<uint32_t>>> grants;
  while (core.arena->num_free() > 0) {
    const auto next = core.hungry.pop([&](Peer* peer) { return may_have_more(core, *peer); });
    if (!next) break;
    const auto& part = *next;
    part->hungry = false;
    if (part->done || part->fetch->ending || part->wanted <= part->granted) continue;
    if (part->peer->state != Peer::kReady) continue;
    const uint32_t slot = grant_slot(core, *part);
    const auto known =
        std::find_if(grants.begin(), grants.end(), [&](const auto& g) { return g.first == part; });
    if (known == grants.end()) {
      grants.emplace_back(part, std::vector<uint32_t>{slot});
    } else {
      known->second.push_back(slot);
    }
    feed(core, part, window_of(core, *part));
  }
  for (const auto& [part, slots] : grants) {
    part->peer->link->send(wire::Credit{part->id, slots}.encode());
  }
}

void free_quarantined(AgentCore& core, Peer& peer, uint64_t fetch_id) {
  bool freed = false;
  for (uint32_t slot = 0; slot < core.slots.size(); ++slot) {
    const SlotInfo& info = core.slots[slot];
    if (info.state != SlotInfo::kQuarantined || info.peer != peer.id || info.fetch_id != fetch_id)
      continue;
    free_slot(core, slot);
    freed = true;
  }
  if (freed) grant_slots(core);
}

void free_slots_of(AgentCore& core, PeerId peer) {
  for (uint32_t slot = 0; slot < core.slots.size(); ++slot) {
    const SlotInfo& info = core.slots[slot];
    if (info.peer != peer || info.state == SlotInfo::kFree || info.state == SlotInfo::kUnpacking)
      continue;
    free_slot(core, slot);
  }
  if (core.arena) grant_slots(core);
}

}  // namespace kvxfer
