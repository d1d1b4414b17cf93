#include <algorithm>
#include <set>
#include <utility>

#include "engine/core.h"
#include "kvxfer/pack.h"

namespace kvxfer {
namespace {

constexpr uint32_t kMinChunk = 128u << 10;  // smaller ones cost more in messages than they win

uint32_t window_of(const AgentCore& core, const Part& part) {
  return part.peer->link->one_sided() ? core.options.window : core.options.copied_window;
}

// Smaller chunks for small fetches, so that packing and unpacking overlap there too.
uint32_t pick_chunk_bytes(const AgentCore& core, const Part& part) {
  uint64_t most = std::min(core.options.slot_bytes, part.peer->slot_bytes);
  if (!part.peer->link->one_sided())
    most = std::min<uint64_t>(most, core.options.copied_chunk_bytes);
  const uint64_t share = (part.wire_bytes / core.options.window + 4095) / 4096 * 4096;
  uint64_t row = 0;  // the least that a chunk must hold
  for (const PlaneSpec& plane : part.fetch->cache->layout.planes) {
    row = std::max(row, plane.content * element_bytes(part.fetch->cache->layout.element));
  }
  return static_cast<uint32_t>(std::min(most, std::max({uint64_t{kMinChunk}, share, row})));
}

// A report on several parts names everything once.
void add_distinct(std::string& list, const std::string& text) {
  if ((", " + list + ", ").find(", " + text + ", ") != std::string::npos) return;
  list += (list.empty() ? "" : ", ") + text;
}

void free_slot(AgentCore& core, uint32_t slot) {
  core.slots[slot] = {};
  core.arena->give_back(slot);
}

void announce(Peer& peer, const Cache& cache) {
  if (!peer.announced.insert(cache.id).second) return;
  const CacheLayout& layout = cache.layout;
  const auto lowest =
      std::min_element(layout.views.begin(), layout.views.end(),
                       [](const PlaneView& a, const PlaneView& b) { return a.data < b.data; });
  wire::Layout message;
  message.cache_id = cache.id;
  message.model = layout.model;
  message.element = static_cast<uint8_t>(layout.element);
  message.num_blocks = layout.num_blocks;
  message.block_size = layout.block_size;
  message.num_heads = layout.num_heads;
  message.first_head = layout.first_head;
  message.layers = layout.layers;
  for (const PlaneSpec& plane : layout.planes)
    message.planes.push_back({plane.name, plane.content});
  for (const PlaneView& view : layout.views) {
    message.views.push_back({static_cast<uint64_t>(view.data - lowest->data), view.block_stride,
                             view.head_stride, view.token_stride, view.content_stride});
  }
  peer.link->send(message.encode());
}

void send_fetch(AgentCore& core, Part& part, const std::vector<uint32_t>& slots) {
  announce(*part.peer, *part.fetch->cache);
  const FetchSpec& spec = part.fetch->spec;
  wire::Fetch message;
  message.fetch_id = part.id;
  message.offer_id = spec.offer_id;
  message.generation = spec.generation;
  message.cache_id = part.fetch->cache->id;
  message.layers = part.spec.layers;
  message.head_begin = part.spec.head_begin;
  message.head_end = part.spec.head_end;
  message.token_begin = spec.table.first_token;
  message.token_end = spec.table.first_token + spec.num_tokens;
  message.slot_in_block = spec.table.first_slot;
  message.with_digest = core.options.digest;
  message.chunk_bytes = part.chunk_bytes;
  message.slots = slots;
  part.sent = true;
  part.peer->link->send(message.encode());
}

uint32_t grant_slot(AgentCore& core, Part& part) {
  const uint32_t slot = *core.arena->take();
  core.slots[slot] = {SlotInfo::kGranted, part.peer->id, part.id};
  part.slots.push_back(slot);
  ++part.granted;
  return slot;
}

// Lets a part ask for slots until it holds `enough`.
void feed(AgentCore& core, const std::shared_ptr<Part>& part, uint32_t enough) {
  const bool wants = !part->done && !part->fetch->ending && part->wanted > part->granted &&
                     part->slots.size() < enough && part->peer->state == Peer::kReady;
  if (!wants || part->hungry) return;
  part->hungry = true;
  core.hungry.push_back(part);
}

void return_slot(AgentCore& core, const std::shared_ptr<Part>& part, uint32_t slot) {
  std::erase(part->slots, slot);
  free_slot(core, slot);
  // Half a window at a time: every credit message wakes the producer's progress thread.
  feed(core, part, window_of(core, *part) / 2 + 1);
}

// Takes back the slots that nothing was committed into. `exposed`: the peer may still write there.
void reclaim_granted(AgentCore& core, Part& part, bool exposed) {
  std::erase_if(part.slots, [&](uint32_t slot) {
    const SlotInfo::State state = core.slots[slot].state;
    if (state != SlotInfo::kGranted && state != SlotInfo::kLanded) return false;
    if (exposed && state == SlotInfo::kGranted) {
      core.slots[slot].state = SlotInfo::kQuarantined;
    } else {
      free_slot(core, slot);
    }
    return true;
  });
}

void complete(AgentCore& core, const std::shared_ptr<FetchState>& fetch) {
  if (fetch->done || !fetch->ending || fetch->unpacking > 0) return;
  fetch->done = true;
  fetch->ended = Clock::now();
  clear_timer(core, fetch->timer);
  --fetch->cache->users;
  core.fetches.erase(fetch->handle);
  fetch->parts.clear();  // they point back here
  fetch->changed.notify_all();
  signal_event(fetch->event);
  core.events.push(fetch->handle);
}

// The whole fetch has arrived: every producer hears DONE once, however many parts it answered,
// since an offer counts them. Not before, or a fetch that then fails could not be tried again.
void succeed(AgentCore& core, const std::shared_ptr<FetchState>& fetch) {
  fetch->ending = true;
  std::set<PeerId> told;
  for (const auto& part : fetch->parts) {
    const auto word =
        told.insert(part->peer->id).second ? wire::MessageType::kDone : wire::MessageType::kCancel;
    part->peer->link->send(wire::encode_fetch_id(word, part->id));
  }
  complete(core, fetch);
}

void complete_part(AgentCore& core, const std::shared_ptr<Part>& part) {
  const auto fetch = part->fetch;
  part->done = true;
  part->peer->parts.erase(part->id);
  reclaim_granted(core, *part, /*exposed=*/false);  // what the producer did not need
  if (--fetch->parts_left == 0) succeed(core, fetch);
}

// Whether the slot that a commit names was granted for its fetch, and nothing has come into it yet.
bool granted_for(const AgentCore& core, const Part& part, const wire::Commit& commit) {
  if (commit.slot >= core.slots.size() || commit.bytes > part.chunk_bytes) return false;
  const SlotInfo& slot = core.slots[commit.slot];
  return slot.state == SlotInfo::kGranted && slot.peer == part.peer->id && slot.fetch_id == part.id;
}

// The bytes are in the slot, and will be unpacked now: by the caller.
void claim_chunk(AgentCore& core, Part& part, const wire::Commit& commit) {
  const bool fits = part.accepted && commit.chunk < part.arrived.size() &&
                    !part.arrived[commit.chunk] &&
                    commit.bytes == part.bounds[commit.chunk + 1] - part.bounds[commit.chunk];
  if (!fits) {
    throw Error(StatusCode::kProtocol, "COMMIT of chunk " + std::to_string(commit.chunk) + " of " +
                                           std::to_string(commit.bytes) +
                                           " bytes, which is not expected");
  }
  part.arrived[commit.chunk] = true;
  core.slots[commit.slot].state = SlotInfo::kUnpacking;
  ++part.fetch->unpacking;
}

void unpack_chunk(AgentCore& core, const std::shared_ptr<Part>& part, const wire::Commit& commit) {
  const auto fetch = part->fetch;
  const uint64_t begin = part->bounds[commit.chunk], end = part->bounds[commit.chunk + 1];
  const Digest found = unpack(*part->plan, begin, end, core.arena->slot(commit.slot),
                              chunk_seed(fetch->spec.generation, begin), core.options.digest);
  Guard guard(core);
  --fetch->unpacking;
  return_slot(core, part, commit.slot);
  if (fetch->ending) {
    complete(core, fetch);
  } else if (core.options.digest && found != commit.digest) {
    ++core.counters.digest_errors;
    fail_fetch(core, fetch,
               {StatusCode::kCorrupt,
                "chunk " + std::to_string(commit.chunk) + " (" + std::to_string(end - begin) +
                    " bytes) of offer '" + fetch->spec.offer_id + "' from '" + part->peer->name +
                    "' over " + part->peer->link->transport() +
                    " does not match its digest: the blocks must not be used; fetch again"});
  } else {
    core.counters.bytes_received += end - begin;
    fetch->report.bytes += end - begin;
    ++fetch->report.chunks;
    if (--part->chunks_left == 0) complete_part(core, part);
  }
  grant_slots(core);
}

}  // namespace

void ensure_arena(AgentCore& core) {
  if (core.arena) return;
  core.arena = std::make_unique<Arena>(Arena::kShared, core.options.arena_bytes,
                                       core.options.slot_bytes, core.options.lock_arena);
  core.slots.resize(core.arena->num_slots());
}

void start_part(AgentCore& core, const std::shared_ptr<Part>& part) {
  Peer& peer = *part->peer;
  part->id = peer.next_fetch_id++;
  peer.parts[part->id] = part;
  part->chunk_bytes = pick_chunk_bytes(core, *part);
  FetchReport& report = part->fetch->report;
  add_distinct(report.transport, peer.link->transport());
  add_distinct(report.link, peer.link->describe());
  add_distinct(report.why, peer.why);
  // While there are plenty, slots go along with the question, which saves a round trip. They are
  // not worth waiting for: the offer may not be there for a long time.
  const uint64_t chunks = (part->wire_bytes + part->chunk_bytes - 1) / part->chunk_bytes;
  std::vector<uint32_t> slots;
  while (slots.size() < std::min<uint64_t>(chunks, window_of(core, *part)) &&
         core.arena->num_free() > std::max(1u, core.arena->num_slots() / 2)) {
    slots.push_back(grant_slot(core, *part));
  }
  send_fetch(core, *part, slots);
}

void grant_slots(AgentCore& core) {
  std::vector<std::pair<std::shared_ptr<Part>, std::vector<uint32_t>>> grants;
  while (!core.hungry.empty() && core.arena->num_free() > 0) {
    const auto part = core.hungry.front();
    core.hungry.pop_front();
    part->hungry = false;
    if (part->done || part->fetch->ending || part->wanted <= part->granted) continue;
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

void handle_accept(AgentCore& core, Peer& peer, const wire::Accept& accept) {
  const auto found = peer.parts.find(accept.fetch_id);
  if (found == peer.parts.end()) return;
  const auto part = found->second;
  const FetchState& fetch = *part->fetch;
  if (part->accepted) throw Error(StatusCode::kProtocol, "ACCEPT came twice");
  const CacheLayout& layout = fetch.cache->layout;
  const uint32_t token_begin = fetch.spec.table.first_token,
                 token_end = token_begin + fetch.spec.num_tokens;
  std::vector<uint32_t> planes(layout.planes.size());
  for (uint32_t i = 0; i < planes.size(); ++i) planes[i] = i;
  WireOrder order;
  std::string letters;
  for (size_t i = 0; i < order.size(); ++i) {
    order[i] = static_cast<Axis>(accept.order[i]);
    letters += "LPTHN"[accept.order[i]];
  }
  part->plan.emplace(
      layout, fetch.spec.table,
      Slice{part->spec.layers, part->spec.head_begin, part->spec.head_end, token_begin, token_end},
      tile_ends(token_begin, token_end, accept.producer_block_size, accept.producer_slot,
                layout.block_size, fetch.spec.table.first_slot),
      order, planes);
  part->bounds = chunk_bounds(*part->plan, static_cast<uint32_t>(part->spec.layers.size()),
                              part->chunk_bytes, accept.per_layer != 0);
  const auto chunks = static_cast<uint32_t>(part->bounds.size() - 1);
  if (accept.num_chunks != chunks || accept.wire_bytes != part->plan->wire_bytes()) {
    fail_fetch(
        core, part->fetch,
        {StatusCode::kMismatch,
         "'" + peer.name + "' means to send " + std::to_string(accept.wire_bytes) + " bytes in " +
             std::to_string(accept.num_chunks) + " chunks, this side expects " +
             std::to_string(part->plan->wire_bytes()) + " in " + std::to_string(chunks)});
    return;
  }
  part->arrived.assign(chunks, false);
  part->chunks_left = chunks;
  part->wanted = accept.per_layer != 0 ? 0 : chunks;  // else WANT says so, layer by layer
  part->accepted = true;
  add_distinct(part->fetch->report.wire_order, letters);
  // What is behind the last token is stale memory: an engine that reads whole blocks must not meet
  // an old NaN there.
  const uint32_t used = (fetch.spec.table.first_slot + fetch.spec.num_tokens) % layout.block_size;
  if (used > 0) {
    ++part->fetch->unpacking;
    run_job(core, (layout.block_size - used) * (part->wire_bytes / fetch.spec.num_tokens),
            [&core, part] {
              zero_tail(*part->plan);
              Guard guard(core);
              --part->fetch->unpacking;
              complete(core, part->fetch);
            });
  }
  for (const wire::Commit& commit : std::exchange(part->early, {})) {
    claim_chunk(core, *part, commit);
    run_job(core, commit.bytes, [&core, part, commit] { unpack_chunk(core, part, commit); });
  }
  feed(core, part, window_of(core, *part));
  grant_slots(core);
}

void handle_want(AgentCore& core, Peer& peer, const wire::Want& want) {
  const auto found = peer.parts.find(want.fetch_id);
  if (found == peer.parts.end() || !found->second->accepted) return;
  const auto& part = found->second;
  const uint64_t wanted = uint64_t{part->wanted} + want.chunks;
  part->wanted = static_cast<uint32_t>(std::min<uint64_t>(wanted, part->arrived.size()));
  feed(core, part, window_of(core, *part));
  grant_slots(core);
}

void handle_refused(AgentCore& core, Peer& peer, const wire::Refused& refused) {
  free_quarantined(core, peer, refused.fetch_id);
  const auto found = peer.parts.find(refused.fetch_id);
  if (found == peer.parts.end()) return;
  const auto part = found->second;
  part->sent = false;  // nothing is under way for it any more: neither CANCEL nor quarantine
  fail_fetch(core, part->fetch, {refused.code, "'" + peer.name + "' refused: " + refused.reason});
}

void fail_fetch(AgentCore& core, const std::shared_ptr<FetchState>& fetch, Status status) {
  if (fetch->ending) return;
  fetch->ending = true;
  fetch->status = std::move(status);
  for (const auto& part : fetch->parts) {
    Peer& peer = *part->peer;
    // Also where a part has arrived: its producer waits for DONE.
    if (part->sent && peer.state == Peer::kReady) {
      peer.link->send(wire::encode_fetch_id(wire::MessageType::kCancel, part->id));
    }
    if (std::exchange(part->done, true)) continue;
    // A peer that writes without asking us may still do so until it acknowledges or is gone.
    reclaim_granted(core, *part, part->sent && peer.link && peer.link->one_sided());
    peer.parts.erase(part->id);
  }
  complete(core, fetch);
  if (core.arena) grant_slots(core);
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

// A commit on a mapped arena: the bytes are in the slot.
void handle_commit(AgentCore& core, Peer& peer, const wire::Commit& commit) {
  const auto found = peer.parts.find(commit.fetch_id);
  if (found == peer.parts.end()) return;  // cancelled: the slot is in quarantine
  const auto part = found->second;
  if (!peer.link->one_sided() || !granted_for(core, *part, commit)) {
    throw Error(StatusCode::kProtocol, "COMMIT of chunk " + std::to_string(commit.chunk) +
                                           " into slot " + std::to_string(commit.slot) +
                                           ", which was not granted for it");
  }
  claim_chunk(core, *part, commit);
  run_job(core, commit.bytes, [&core, part, commit] { unpack_chunk(core, part, commit); });
}

std::byte* Peer::on_incoming(Link&, uint64_t offset, uint64_t size,
                             std::span<const std::byte> notice) {
  Guard guard(*core);
  if (state != kReady) return nullptr;
  try {
    if (wire::type_of(notice) != wire::MessageType::kCommit) {
      throw Error(StatusCode::kProtocol, "a write came without a COMMIT");
    }
    const auto commit = wire::Commit::decode(notice.subspan(1));
    const auto found = parts.find(commit.fetch_id);
    if (found == parts.end()) return nullptr;
    const Part& part = *found->second;
    // Late and repeated writes are thrown away; what was asked for still comes.
    if (!granted_for(*core, part, commit)) return nullptr;
    if (part.accepted && commit.chunk < part.arrived.size() && part.arrived[commit.chunk])
      return nullptr;
    if (size != commit.bytes ||
        offset != static_cast<uint64_t>(commit.slot) * core->options.slot_bytes) {
      throw Error(StatusCode::kProtocol, "a write is not where its COMMIT says");
    }
    core->slots[commit.slot].state = SlotInfo::kReceiving;
    return core->arena->slot(commit.slot);
  } catch (const Error& error) {
    drop_peer(*core, shared_from_this(), {error.code(), "'" + name + "': " + error.what()});
    return nullptr;
  }
}

void Peer::on_landed(Link&, std::span<const std::byte> notice, bool accepted) {
  last_heard = Clock::now();
  if (!accepted) return;
  const auto commit = wire::Commit::decode(notice.subspan(1));  // on_incoming() has read it before
  std::shared_ptr<Part> part;
  {
    Guard guard(*core);
    const auto found = parts.find(commit.fetch_id);
    if (found == parts.end()) {  // cancelled while the bytes were on their way
      if (core->slots[commit.slot].state == SlotInfo::kReceiving) free_slot(*core, commit.slot);
      grant_slots(*core);
      return;
    }
    part = found->second;
    if (!part->accepted) {  // data streams may overtake the control stream, which brings the ACCEPT
      core->slots[commit.slot].state = SlotInfo::kLanded;
      part->early.push_back(commit);
      return;
    }
    try {
      claim_chunk(*core, *part, commit);
    } catch (const Error& error) {
      drop_peer(*core, shared_from_this(), {error.code(), "'" + name + "': " + error.what()});
      free_slot(*core, commit.slot);
      grant_slots(*core);
      return;
    }
  }
  // Here, on the receiving thread: the bytes are in this core's cache.
  unpack_chunk(*core, part, commit);
}

}  // namespace kvxfer
