#include <algorithm>
#include <utility>

#include "engine/codec_choice.h"
#include "engine/core.h"

namespace kvxfer {
namespace {

// Throws Error(kProtocol) when a slot is not in the consumer's arena.
void check_slots(const Peer& peer, std::span<const uint32_t> slots) {
  const auto mapped = peer.link->mapped_arena();
  if (mapped.empty()) return;
  // Whole ones: the consumer's GPU memory has no more.
  const uint64_t whole = mapped.size() / peer.slot_bytes;
  for (uint32_t slot : slots) {
    if (slot >= whole) {
      throw Error(StatusCode::kProtocol,
                  "slot " + std::to_string(slot) + " lies outside the arena");
    }
  }
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
  let_go(core, *serve);
  serve->direct.reset();  // AgentCore::serve_queue may keep the serve
  if (serve->offer) {
    serve->offer->serves.erase(serve);
    release_if_unread(core, *serve->offer);
  }
}

// Takes a serve on, or refuses it.
bool admit(AgentCore& core, const std::shared_ptr<Serve>& serve) {
  Peer& peer = *serve->peer;
  const uint64_t id = serve->request.fetch_id;
  if (peer.serves.contains(id)) throw Error(StatusCode::kProtocol, "an id in use is repeated");
  peer.serves[id] = serve;
  try {
    hold(core, *serve, bytes_of(*serve));
    return true;
  } catch (const Error& error) {
    refuse(core, serve, {error.code(), error.what()});
    return false;
  }
}

// Runs on the pool, without the mutex: measuring takes a while, once.
void measure_and_find_offer(AgentCore& core, const std::shared_ptr<Serve>& serve) {
  try {
    codec_rates();
    Guard guard(core);
    if (!serve->ended) find_offer(core, serve);
  } catch (const std::exception& error) {  // std::bad_alloc: measuring takes tens of megabytes
    Guard guard(core);
    refuse(core, serve,
           {StatusCode::kNoResources,
            "'" + core.options.name + "' could not serve it: " + error.what()});
  }
}

}  // namespace

void find_offer(AgentCore& core, const std::shared_ptr<Serve>& serve) {
  const Generation& generation = serve->request.generation;
  const auto found = core.offers.find(generation);
  if (found != core.offers.end()) {
    const auto offer = found->second;  // which may end here, and be erased there
    begin_serving(core, serve, offer);
    return start_packs(core);
  }
  if (const auto past = core.history.find(generation); past != core.history.end()) {
    const Status told = past->second;
    return answer_ended(core, serve, told);
  }
  if (core.offer_ids.contains(serve->request.offer_id)) {
    return answer_ended(
        core, serve,
        {StatusCode::kStale,
         "offer '" + serve->request.offer_id + "' is open on '" + core.options.name +
             "' with another generation than the ticket's, which is of an earlier or of a later "
             "request of that id: ask for a new ticket, and use an id again only when its offer "
             "has ended"});
  }
  core.waiting[generation].insert(serve);
}

void queue_serve(AgentCore& core, const std::shared_ptr<Serve>& serve) {
  if (serve->queued || serve->ended || serve->ready.empty() || serve->credits.empty()) return;
  serve->queued = true;
  core.serve_queue.push(
      {serve->peer.get(), serve->direct.has_value(), serve->offer->cache->gpu.get()}, serve);
}

void land_flight(AgentCore& core, const std::shared_ptr<Serve>& serve) {
  --serve->in_flight;
  if (serve->ended && serve->in_flight == 0) finish_serve(core, serve);
}

void handle_fetch(AgentCore& core, const std::shared_ptr<Peer>& peer, wire::FetchDirect asked,
                  uint32_t arena) {
  wire::Fetch& request = asked.fetch;
  if (request.chunk_bytes < wire::kMinChunk || request.chunk_bytes > peer->slot_bytes) {
    throw Error(StatusCode::kProtocol,
                "FETCH wants chunks of " + std::to_string(request.chunk_bytes) + " bytes");
  }
  check_slots(*peer, request.slots);
  auto serve = std::make_shared<Serve>();
  serve->peer = peer;
  serve->request = std::move(request);
  serve->path = asked.path;
  serve->blocks = std::move(asked.blocks);
  serve->arena = arena;
  if (!admit(core, serve)) return;
  const bool left_to_us = static_cast<Codec>(serve->request.codec) == Codec::kAuto;
  const bool matters = left_to_us && peer->link->crosses_wire();  // else the answer is raw
  if (!matters || codec_rates_known()) return find_offer(core, serve);
  if (core.pool->submit([&core, serve] { measure_and_find_offer(core, serve); })) return;
  refuse(core, serve, {StatusCode::kClosed, "agent '" + core.options.name + "' is closing"});
}

void handle_decline(AgentCore& core, const std::shared_ptr<Peer>& peer,
                    const wire::Decline& decline) {
  auto serve = std::make_shared<Serve>();
  serve->peer = peer;
  serve->request.fetch_id = decline.fetch_id;
  serve->request.offer_id = decline.offer_id;
  serve->request.generation = decline.generation;
  serve->request.cache_id = decline.cache_id;
  serve->request.consumers = decline.consumers;
  serve->declines = true;
  serve->given_up = decline.given_up != 0;
  if (admit(core, serve)) find_offer(core, serve);
}

void answer_ended(AgentCore& core, const std::shared_ptr<Serve>& serve, const Status& outcome) {
  if (!serve->declines) return refuse(core, serve, outcome);
  end_serve(core, serve,
            wire::encode_fetch_id(wire::MessageType::kDeclined, serve->request.fetch_id));
}

void begin_serving(AgentCore& core, const std::shared_ptr<Serve>& serve,
                   const std::shared_ptr<OfferState>& offer) {
  if (serve->declines) {
    if (serve->request.offer_id == offer->id) count_decline(core, offer, *serve);
    return answer_ended(core, serve, {});
  }
  if (offer->ended) return answer_ended(core, serve, core.history[offer->generation]);
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
    const auto accept = accept_fetch(core, *serve, *offer, layout->second.layout);
    if (!accept && serve->arena != 0) return import_and_serve(core, serve, offer);
    if (!accept) return register_and_serve(core, serve, offer);
    hold(core, *serve, bytes_of_plans(*serve));
    serve->peer->link->send(*accept);
  } catch (const Error& error) {
    return refuse(core, serve, {error.code(), error.what()});
  } catch (const std::exception& error) {  // std::bad_alloc
    return refuse(core, serve, {StatusCode::kNoResources, error.what()});
  }
  serve->offer = offer;
  serve->began = Clock::now();
  offer->serves.insert(serve);
  core.recorder.add(TraceKind::kServe, offer->generation,
                    {.peer = serve->peer->id, .bytes = serve->plan->wire_bytes()});
  offer->consumers = std::max(offer->consumers, serve->request.consumers);
  renew_lease(*offer);
  if (!serve->per_layer) {
    serve->ready.emplace_back(0, serve->plan->num_chunks());
  } else {
    for (uint32_t layer = 0; layer < offer->ready.size(); ++layer) {
      if (offer->ready[layer] && serve->wire_layer[layer] >= 0) {
        serve->ready.push_back(
            serve->plan->chunks_of_layer(static_cast<uint32_t>(serve->wire_layer[layer])));
      }
    }
  }
  want_slots(*serve);
  serve->blocks = {};
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
        serve->plan->chunks_of_layer(static_cast<uint32_t>(serve->wire_layer[layer])));
    want_slots(*serve);
    queue_serve(core, serve);
  }
}

void handle_credit(AgentCore& core, Peer& peer, const wire::Credit& credit) {
  const auto found = peer.serves.find(credit.fetch_id);
  if (found == peer.serves.end() || found->second->ended) return;
  const auto& serve = found->second;
  check_slots(peer, credit.slots);
  if (!serve->plan || serve->credits.size() + credit.slots.size() > serve->plan->num_chunks()) {
    throw Error(StatusCode::kProtocol, "CREDIT before ACCEPT, or for more slots than chunks");
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

void refuse(AgentCore& core, const std::shared_ptr<Serve>& serve, const Status& why) {
  if (serve->ended) return;
  const wire::Fetch& request = serve->request;
  core.recorder.add(TraceKind::kRefuse, request.generation,
                    {.peer = serve->peer->id, .code = why.code, .name = request.offer_id});
  const double wait = why.code == StatusCode::kBusy ? retry_seconds(core) : 0;
  end_serve(
      core, serve,
      wire::Refused{request.fetch_id, why.code, why.message, static_cast<uint32_t>(wait * 1e3)}
          .encode());
}

void handle_done(AgentCore& core, Peer& peer, uint64_t fetch_id) {
  const auto found = peer.serves.find(fetch_id);
  if (found == peer.serves.end() || found->second->ended) return;
  const auto serve = found->second;
  const auto offer = serve->offer;
  if (!offer) throw Error(StatusCode::kProtocol, "DONE for a fetch that was never accepted");
  end_serve(core, serve, std::nullopt);
  count_fetch(core, offer, *serve);
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

}  // namespace kvxfer
