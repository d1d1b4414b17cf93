#include <algorithm>
#include <utility>

#include "engine/core.h"
#include "kvxfer/pack.h"

namespace kvxfer {
namespace {

constexpr size_t kMaxServesPerPeer = 4096;

wire::Bytes refusal(const Serve& serve, StatusCode code, const std::string& reason) {
  return wire::Refused{serve.request.fetch_id, code, reason}.encode();
}

std::string range(uint32_t begin, uint32_t end) {
  return "[" + std::to_string(begin) + ", " + std::to_string(end) + ")";
}

// Everything about the two caches and the slice that must agree. Throws Error(kMismatch).
void check_fit(const AgentCore& core, const wire::Fetch& request, const OfferState& offer,
               const CacheLayout& theirs) {
  const CacheLayout& ours = offer.cache->layout;
  const auto mismatch = [&](const std::string& what, const std::string& held,
                            const std::string& wanted) {
    throw Error(StatusCode::kMismatch, "offer '" + offer.id + "': " + what + ": producer '" +
                                           core.options.name + "' has " + held +
                                           ", the consumer's cache has " + wanted);
  };
  if (!ours.model.empty() && !theirs.model.empty() && ours.model != theirs.model) {
    mismatch("different models", "'" + ours.model + "'", "'" + theirs.model + "'");
  }
  if (ours.element != theirs.element) {
    mismatch("different element types", element_name(ours.element), element_name(theirs.element));
  }
  const auto plane_list = [](const CacheLayout& layout) {
    std::string text;
    for (const PlaneSpec& plane : layout.planes) {
      text += (text.empty() ? "" : ", ") + plane.name + " of " + std::to_string(plane.content);
    }
    return text + " elements a token and head";
  };
  bool same_planes = ours.planes.size() == theirs.planes.size();
  for (const PlaneSpec& plane : theirs.planes) {
    same_planes &= std::any_of(ours.planes.begin(), ours.planes.end(), [&](const PlaneSpec& mine) {
      return mine.name == plane.name && mine.content == plane.content;
    });
  }
  if (!same_planes)
    mismatch("different planes or head sizes", plane_list(ours), plane_list(theirs));
  for (uint32_t layer : request.layers) {
    if (layer >= theirs.layers.size())
      throw Error(StatusCode::kProtocol, "FETCH names a layer that LAYOUT has not");
    if (!offer.cache->layer_index.contains(theirs.layers[layer])) {
      throw Error(StatusCode::kMismatch, "offer '" + offer.id + "': producer '" +
                                             core.options.name + "' holds no layer '" +
                                             theirs.layers[layer] + "'; it holds " +
                                             std::to_string(ours.layers.size()) +
                                             " layers, the first is '" + ours.layers.front() + "'");
    }
  }
  const uint32_t head_end = ours.first_head + ours.num_heads;
  if (request.head_begin < ours.first_head || request.head_end > head_end ||
      request.head_begin >= request.head_end) {
    mismatch("kv heads", range(ours.first_head, head_end),
             "asked for " + range(request.head_begin, request.head_end));
  }
  if (request.token_begin < offer.table.first_token || request.token_end > offer.token_end ||
      request.token_begin >= request.token_end) {
    mismatch("tokens", range(offer.table.first_token, offer.token_end),
             "asked for " + range(request.token_begin, request.token_end));
  }
  if (request.codec != 0) {
    throw Error(StatusCode::kMismatch,
                "codec " + std::to_string(request.codec) + " is not known here, only raw (0)");
  }
  if (request.layers.empty() || request.chunk_bytes == 0 ||
      request.chunk_bytes > core.options.slot_bytes || request.slot_in_block >= theirs.block_size) {
    throw Error(StatusCode::kProtocol,
                "FETCH is out of bounds: no layers, or chunk or slot too large");
  }
}

void plan_serve(Serve& serve, const OfferState& offer, const CacheLayout& theirs) {
  const wire::Fetch& request = serve.request;
  const CacheLayout& ours = offer.cache->layout;
  Slice slice{{}, request.head_begin, request.head_end, request.token_begin, request.token_end};
  serve.wire_layer.assign(ours.layers.size(), -1);
  for (size_t i = 0; i < request.layers.size(); ++i) {
    const uint32_t layer = offer.cache->layer_index.at(theirs.layers[request.layers[i]]);
    if (serve.wire_layer[layer] >= 0)
      throw Error(StatusCode::kProtocol, "FETCH names a layer twice");
    serve.wire_layer[layer] = static_cast<int32_t>(i);
    slice.layers.push_back(layer);
  }
  std::vector<uint32_t> plane_of;
  for (const PlaneSpec& plane : theirs.planes) {
    const auto mine =
        std::find_if(ours.planes.begin(), ours.planes.end(),
                     [&](const PlaneSpec& candidate) { return candidate.name == plane.name; });
    plane_of.push_back(static_cast<uint32_t>(mine - ours.planes.begin()));
  }
  const uint32_t slot =
      (offer.table.first_slot + request.token_begin - offer.table.first_token) % ours.block_size;
  serve.per_layer = offer.ready_left > 0;
  const OrderKey key{request.cache_id, offer.cache->id, serve.per_layer};
  auto known = serve.peer->orders.find(key);
  if (known == serve.peer->orders.end()) {
    known = serve.peer->orders.emplace(key, choose_wire_order(ours, theirs, serve.per_layer)).first;
  }
  const WireOrder order = known->second;
  serve.plan.emplace(ours, offer.table, slice,
                     tile_ends(request.token_begin, request.token_end, ours.block_size, slot,
                               theirs.block_size, request.slot_in_block),
                     order, plane_of);
  serve.bounds = chunk_bounds(*serve.plan, static_cast<uint32_t>(slice.layers.size()),
                              request.chunk_bytes, serve.per_layer);
  wire::Accept accept;
  accept.fetch_id = request.fetch_id;
  for (size_t i = 0; i < order.size(); ++i) accept.order[i] = static_cast<uint8_t>(order[i]);
  accept.per_layer = serve.per_layer;
  accept.num_chunks = static_cast<uint32_t>(serve.bounds.size() - 1);
  accept.wire_bytes = serve.plan->wire_bytes();
  accept.producer_block_size = ours.block_size;
  accept.producer_slot = slot;
  serve.peer->link->send(accept.encode());
}

// Throws Error(kProtocol) when a slot is not in the consumer's arena.
void check_slots(const Peer& peer, uint32_t chunk_bytes, std::span<const uint32_t> slots) {
  const auto mapped = peer.link->mapped_arena();
  for (uint32_t slot : slots) {
    const uint64_t end = static_cast<uint64_t>(slot) * peer.slot_bytes + chunk_bytes;
    if (!mapped.empty() && end > mapped.size()) {
      throw Error(StatusCode::kProtocol,
                  "slot " + std::to_string(slot) + " lies outside the arena");
    }
  }
}

void queue_serve(AgentCore& core, const std::shared_ptr<Serve>& serve) {
  if (serve->queued || serve->ended || serve->ready.empty() || serve->credits.empty()) return;
  serve->queued = true;
  core.serve_queue.push_back(serve);
}

// Chunks of wire layer `layer`, when no chunk spans two.
std::pair<uint32_t, uint32_t> chunks_of_layer(const Serve& serve, uint32_t layer) {
  const uint64_t layer_bytes = serve.plan->wire_bytes() / serve.request.layers.size();
  const auto index = [&](uint64_t offset) {
    return static_cast<uint32_t>(
        std::lower_bound(serve.bounds.begin(), serve.bounds.end(), offset) - serve.bounds.begin());
  };
  return {index(layer * layer_bytes), index((layer + 1) * layer_bytes)};
}

// Asks for slots for chunks that can be sent and were not asked for yet.
void want_slots(Serve& serve) {
  if (!serve.per_layer) return;  // then the consumer knows: all of them
  uint32_t chunks = 0;
  for (const auto& [begin, end] : serve.ready) chunks += end - begin;
  if (chunks <= serve.asked) return;
  serve.peer->link->send(wire::Want{serve.request.fetch_id, chunks - serve.asked}.encode());
  serve.asked = chunks;
}

// The serve has nothing under way any more: say the last word and forget it.
void finish_serve(AgentCore& core, const std::shared_ptr<Serve>& serve) {
  if (serve->last_word) serve->peer->link->send(*serve->last_word);
  serve->peer->serves.erase(serve->request.fetch_id);
  if (serve->offer) {
    serve->offer->serves.erase(serve);
    release_if_unread(core, *serve->offer);
  }
}

void land_flight(AgentCore& core, const std::shared_ptr<Serve>& serve) {
  --serve->in_flight;
  if (serve->ended && serve->in_flight == 0) finish_serve(core, serve);
}

// Whether a chunk to this peer can be staged. Not when all slots are taken, or when the peer has
// its share: a consumer that reads slowly must not hold up the others.
bool reserve_staging(AgentCore& core, Peer& peer) {
  if (core.staged == core.staging->num_slots() || peer.staged >= core.staging->num_slots() / 2) {
    return false;
  }
  ++core.staged;
  ++peer.staged;
  return true;
}

void unreserve_staging(AgentCore& core, Peer& peer) {
  --core.staged;
  --peer.staged;
}

// The slot for a reservation: the one that this thread used last, if it is free, for another core
// would have to fetch every line of it out of this one's cache.
uint32_t take_staging(AgentCore& core) {
  thread_local std::optional<uint32_t> last;
  const Guard guard(core);
  last = core.staging->take(last);
  return *last;
}

void pack_chunk(AgentCore& core, const std::shared_ptr<Serve>& serve, uint32_t chunk, uint32_t slot,
                bool staged) {
  const uint64_t begin = serve->bounds[chunk], end = serve->bounds[chunk + 1];
  const auto& link = serve->peer->link;
  const uint64_t offset = static_cast<uint64_t>(slot) * serve->peer->slot_bytes;
  const uint32_t staging_slot = staged ? take_staging(core) : 0;
  std::byte* wire_bytes =
      staged ? core.staging->slot(staging_slot) : link->mapped_arena().data() + offset;
  wire::Commit commit{serve->request.fetch_id, chunk, slot, static_cast<uint32_t>(end - begin), {}};
  commit.digest =
      pack(*serve->plan, begin, end, wire_bytes, chunk_seed(serve->request.generation, begin),
           serve->request.with_digest != 0, /*stream=*/!staged);
  const wire::Bytes message = commit.encode();
  uint64_t token = 0;
  {
    Guard guard(core);
    --core.packing;
    --serve->offer->reading;
    core.counters.bytes_sent += end - begin;
    if (serve->ended) {
      if (staged) {
        core.staging->give_back(staging_slot);
        unreserve_staging(core, *serve->peer);
      }
      release_if_unread(core, *serve->offer);
      land_flight(core, serve);
    } else if (staged) {
      token = core.next_token++;
      core.writing.emplace(token, Writing{serve, staging_slot});
    } else {
      link->send(message);
      land_flight(core, serve);
    }
    start_packs(core);
  }
  // Outside the mutex: the transport may copy a megabyte to the kernel in here.
  if (token != 0) link->write({wire_bytes, end - begin}, offset, message, token);
}

}  // namespace

void handle_fetch(AgentCore& core, const std::shared_ptr<Peer>& peer, wire::Fetch request) {
  if (peer->serves.contains(request.fetch_id))
    throw Error(StatusCode::kProtocol, "FETCH repeats an id in use");
  if (request.chunk_bytes < wire::kMinChunk || request.chunk_bytes > peer->slot_bytes) {
    throw Error(StatusCode::kProtocol,
                "FETCH wants chunks of " + std::to_string(request.chunk_bytes) + " bytes");
  }
  check_slots(*peer, request.chunk_bytes, request.slots);
  auto serve = std::make_shared<Serve>();
  serve->peer = peer;
  serve->request = std::move(request);
  const auto refuse = [&](StatusCode code, const std::string& reason) {
    peer->link->send(refusal(*serve, code, reason));
  };
  if (peer->serves.size() >= kMaxServesPerPeer) {
    return refuse(StatusCode::kNoResources,
                  "'" + core.options.name + "' serves too many fetches of this peer at once");
  }
  const Generation& generation = serve->request.generation;
  const auto found = core.offers.find(generation);
  if (found != core.offers.end()) {
    peer->serves[serve->request.fetch_id] = serve;
    begin_serving(core, serve, found->second);
    return start_packs(core);
  }
  if (const auto past = core.history.find(generation); past != core.history.end()) {
    return refuse(past->second.code, past->second.message);
  }
  if (core.offer_ids.contains(serve->request.offer_id)) {
    return refuse(StatusCode::kStale, "offer '" + serve->request.offer_id +
                                          "' has a newer generation on '" + core.options.name +
                                          "' than the ticket: ask for a new ticket");
  }
  peer->serves[serve->request.fetch_id] = serve;
  core.waiting[generation].insert(serve);
}

void begin_serving(AgentCore& core, const std::shared_ptr<Serve>& serve,
                   const std::shared_ptr<OfferState>& offer) {
  try {
    if (serve->request.offer_id != offer->id) {
      throw Error(StatusCode::kStale,
                  "the ticket names offer '" + serve->request.offer_id +
                      "', but its generation belongs to another: the ticket is damaged");
    }
    const auto layout = serve->peer->layouts.find(serve->request.cache_id);
    if (layout == serve->peer->layouts.end()) {
      throw Error(StatusCode::kProtocol, "FETCH came before the LAYOUT of its cache");
    }
    check_fit(core, serve->request, *offer, layout->second);
    plan_serve(*serve, *offer, layout->second);
  } catch (const Error& error) {
    end_serve(core, serve, refusal(*serve, error.code(), error.what()));
    return;
  } catch (const std::exception& error) {  // std::bad_alloc
    end_serve(core, serve, refusal(*serve, StatusCode::kNoResources, error.what()));
    return;
  }
  serve->offer = offer;
  offer->serves.insert(serve);
  renew_lease(*offer);
  if (!serve->per_layer) {
    serve->ready.emplace_back(0, static_cast<uint32_t>(serve->bounds.size() - 1));
  } else {
    for (uint32_t layer = 0; layer < offer->ready.size(); ++layer) {
      if (offer->ready[layer] && serve->wire_layer[layer] >= 0) {
        serve->ready.push_back(
            chunks_of_layer(*serve, static_cast<uint32_t>(serve->wire_layer[layer])));
      }
    }
  }
  want_slots(*serve);
  const std::vector<uint32_t> slots = std::exchange(serve->request.slots, {});
  serve->credits.insert(serve->credits.end(), slots.begin(), slots.end());
  queue_serve(core, serve);
}

void layer_ready(AgentCore& core, OfferState& offer, uint32_t layer) {
  if (offer.ended || offer.ready[layer]) return;
  offer.ready[layer] = true;
  --offer.ready_left;
  renew_lease(offer);  // the owner is alive and at work on it
  for (const auto& serve : offer.serves) {
    if (serve->ended || serve->wire_layer[layer] < 0) continue;
    serve->ready.push_back(
        chunks_of_layer(*serve, static_cast<uint32_t>(serve->wire_layer[layer])));
    want_slots(*serve);
    queue_serve(core, serve);
  }
}

void handle_credit(AgentCore& core, Peer& peer, const wire::Credit& credit) {
  const auto found = peer.serves.find(credit.fetch_id);
  if (found == peer.serves.end() || found->second->ended) return;
  const auto& serve = found->second;
  check_slots(peer, serve->request.chunk_bytes, credit.slots);
  if (!serve->plan || serve->credits.size() + credit.slots.size() > wire::kMaxSlots) {
    throw Error(StatusCode::kProtocol, "CREDIT before ACCEPT, or for more slots than an arena has");
  }
  serve->credits.insert(serve->credits.end(), credit.slots.begin(), credit.slots.end());
  queue_serve(core, serve);
  start_packs(core);
}

void end_serve(AgentCore& core, const std::shared_ptr<Serve>& serve,
               std::optional<wire::Bytes> last_word) {
  if (serve->ended) return;
  serve->ended = true;
  serve->last_word = std::move(last_word);
  serve->ready.clear();
  serve->credits.clear();
  if (const auto early = core.waiting.find(serve->request.generation);
      early != core.waiting.end()) {
    early->second.erase(serve);
    if (early->second.empty()) core.waiting.erase(early);
  }
  if (serve->in_flight == 0) finish_serve(core, serve);
}

void handle_done(AgentCore& core, Peer& peer, uint64_t fetch_id) {
  const auto found = peer.serves.find(fetch_id);
  if (found == peer.serves.end()) return;
  const auto serve = found->second;
  const auto offer = serve->offer;
  if (!offer) throw Error(StatusCode::kProtocol, "DONE for a fetch that was never accepted");
  end_serve(core, serve, std::nullopt);
  if (offer->ended) return;
  renew_lease(*offer);
  if (--offer->consumers_left == 0) end_offer(core, offer, {});
}

void handle_cancel(AgentCore& core, Peer& peer, uint64_t fetch_id) {
  const auto found = peer.serves.find(fetch_id);
  const auto word = wire::encode_fetch_id(wire::MessageType::kCancelled, fetch_id);
  if (found == peer.serves.end()) {
    peer.link->send(word);  // it had ended here: nothing of it is under way
    return;
  }
  const auto serve = found->second;
  if (serve->ended) {
    serve->last_word = word;  // still packing: the word follows when that is over
  } else {
    end_serve(core, serve, word);
  }
}

void start_packs(AgentCore& core) {
  // One more than there are workers, so that a worker that is done finds the next chunk waiting.
  const uint32_t limit = core.options.threads + 1;
  size_t passed_over = 0;  // they wait for staging: on_written() comes back here
  while (core.packing < limit && passed_over < core.serve_queue.size()) {
    const auto serve = std::move(core.serve_queue.front());
    core.serve_queue.pop_front();
    serve->queued = false;
    if (serve->ended || serve->ready.empty() || serve->credits.empty()) continue;
    const bool staged = serve->peer->link->mapped_arena().empty();
    if (staged && !reserve_staging(core, *serve->peer)) {
      queue_serve(core, serve);
      ++passed_over;
      continue;
    }
    auto& [next, end] = serve->ready.front();
    const uint32_t chunk = next++;
    if (next == end) serve->ready.pop_front();
    if (serve->asked > 0) --serve->asked;
    const uint32_t slot = serve->credits.front();
    serve->credits.pop_front();
    ++serve->in_flight;
    ++serve->offer->reading;
    ++core.packing;
    queue_serve(core, serve);
    run_job(core, serve->bounds[chunk + 1] - serve->bounds[chunk],
            [&core, serve, chunk, slot, staged] { pack_chunk(core, serve, chunk, slot, staged); });
  }
}

void Peer::on_written(Link&, uint64_t token, bool) {
  Guard guard(*core);
  auto writing = core->writing.extract(token);
  if (!writing) return;
  core->staging->give_back(writing.mapped().staging_slot);
  unreserve_staging(*core, *this);
  land_flight(*core, writing.mapped().serve);
  start_packs(*core);
}

}  // namespace kvxfer
