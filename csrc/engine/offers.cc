#include <algorithm>

#include "engine/core.h"

namespace kvxfer {
namespace {

constexpr size_t kHistory = 4096;    // ended offers whose fate late fetches are told
constexpr size_t kConsumers = 4096;  // of an offer, that are told apart

void remember(AgentCore& core, const Generation& generation, const Status& outcome) {
  core.history[generation] = outcome;
  core.history_order.push_back(generation);
  if (core.history_order.size() > kHistory) {
    core.history.erase(core.history_order.front());
    core.history_order.pop_front();
  }
}

void arm_lease(AgentCore& core, const std::shared_ptr<OfferState>& offer) {
  set_timer(core, offer->timer, offer->lease_end, [&core, offer] {
    if (offer->lease_end > Clock::now()) {
      arm_lease(core, offer);
      return;
    }
    const auto lease = std::chrono::duration<double>(offer->lease).count();
    end_offer(core, offer,
              {StatusCode::kExpired, "offer '" + offer->id +
                                         "': no consumer was heard from during its lease of " +
                                         std::to_string(lease) + " s"});
  });
}

void count_end(AgentCore& core, const std::shared_ptr<OfferState>& offer) {
  if (++offer->ended_consumers < offer->consumers) return;
  std::string message;
  if (offer->declines > 0) {
    message = "offer '" + offer->id + "': " + std::to_string(offer->declines) + " of " +
              std::to_string(offer->consumers) + " consumers did not fetch it";
  }
  end_offer(core, offer, {StatusCode::kOk, message});
}

Consumer consumer_of(const Serve& serve) { return {serve.peer->name, serve.request.cache_id}; }

// Layers [begin, end) are ready when a GPU's stream has got there.
void mark_later(const std::shared_ptr<OfferState>& offer, uint32_t begin, uint32_t end,
                const std::shared_ptr<GpuEvent>& event) {
  const auto opened = [offer, begin, end](const std::string& failure) {
    AgentCore& core = *offer->core;
    Guard guard(core);
    if (failure.empty()) {
      for (uint32_t layer = begin; layer < end; ++layer) layer_ready(core, *offer, layer);
      start_packs(core);
    } else {
      end_offer(core, offer,
                {StatusCode::kNoResources,
                 "offer '" + offer->id + "': the stream that writes its blocks: " + failure});
    }
  };
  AgentCore& core = *offer->core;
  core.gpu_gate.wait(event, Clock::now() + to_duration(core.options.gpu_timeout), opened);
}

void note_fetch(OfferState& offer, const Serve& serve) {
  if (offer.fetched_by.size() < kConsumers) offer.fetched_by.insert(consumer_of(serve));
}

void mark_layers(const std::shared_ptr<OfferState>& offer, uint32_t begin, uint32_t end,
                 void* stream) {
  AgentCore& core = *offer->core;
  if (const auto event = stream_event(*offer->cache, stream)) {
    return mark_later(offer, begin, end, event);
  }
  Guard guard(core);
  for (uint32_t layer = begin; layer < end; ++layer) layer_ready(core, *offer, layer);
  start_packs(core);
}

}  // namespace

void renew_lease(OfferState& offer) {
  // The timer looks at lease_end when it fires, so nothing is re-armed on every heartbeat.
  offer.lease_end = std::max(offer.lease_end, Clock::now() + offer.lease);
}

void end_offer(AgentCore& core, const std::shared_ptr<OfferState>& offer, Status outcome) {
  if (offer->ended) return;
  offer->ended = true;
  core.recorder.add(outcome.code == StatusCode::kExpired ? TraceKind::kExpire : TraceKind::kRelease,
                    offer->generation,
                    {.began = offer->began, .code = outcome.code, .name = offer->id});
  clear_timer(core, offer->timer);
  core.offers.erase(offer->generation);
  core.offer_ids.erase(offer->id);
  remember(core, offer->generation,
           outcome.ok()
               ? Status{StatusCode::kStale, "offer '" + offer->id + "' was fetched " +
                                                (offer->declines > 0 ? "or declined " : "") +
                                                "by all its consumers and has ended"}
               : outcome);
  const Status told = core.history[offer->generation];
  offer->outcome = std::move(outcome);
  const auto serves = offer->serves;
  for (const auto& serve : serves) refuse(core, serve, told);
  release_if_unread(core, *offer);
}

void count_fetch(AgentCore& core, const std::shared_ptr<OfferState>& offer, const Serve& serve) {
  if (offer->ended) return;
  renew_lease(*offer);
  note_fetch(*offer, serve);
  if (offer->declined_by.erase(consumer_of(serve)) > 0) {
    --offer->declines;  // it changed its mind, and was counted then
    return;
  }
  count_end(core, offer);
}

void count_decline(AgentCore& core, const std::shared_ptr<OfferState>& offer, const Serve& serve) {
  if (offer->ended) return;
  offer->consumers = std::max(offer->consumers, serve.request.consumers);
  const Consumer who = consumer_of(serve);
  if (serve.given_up) {
    note_fetch(*offer, serve);
    if (offer->declined_by.erase(who) > 0) return renew_lease(*offer);  // was counted then
  } else if (offer->fetched_by.contains(who) || offer->declined_by.size() >= kConsumers ||
             !offer->declined_by.insert(who).second) {
    return;  // may be the same that is told twice
  }
  renew_lease(*offer);
  ++offer->declines;
  count_end(core, offer);
}

void release_if_unread(AgentCore& core, OfferState& offer) {
  if (!offer.ended || offer.reading > 0 || offer.released || offer.left) return;
  offer.released = true;
  --offer.cache->users;
  const auto kept = core.unreleased.extract(offer.handle);
  offer.changed.notify_all();
  signal_event(offer.event);
  core.events.push(offer.handle);
}

void leave_offer(OfferState& offer, const std::string& why) {
  offer.left = true;
  offer.outcome = {StatusCode::kClosed,
                   "offer '" + offer.id + "': " + why + ", and may still read the blocks"};
  offer.changed.notify_all();
  signal_event(offer.event);
}

Offer Agent::offer(const OfferSpec& spec) {
  AgentCore& core = *core_;
  core.check_fork();
  const auto event = first_event(core, spec.cache, spec.stream, spec.ready);
  Guard guard(core);
  core.check_open();
  const auto cache = core.caches.find(spec.cache);
  if (cache == core.caches.end()) {
    throw Error(StatusCode::kInvalid, "offer '" + spec.id +
                                          "': the cache is not registered with agent '" +
                                          core.options.name + "'");
  }
  if (spec.id.empty() || spec.id.size() > wire::kMaxName) {
    throw Error(StatusCode::kInvalid,
                "an offer's id must have 1 to " + std::to_string(wire::kMaxName) + " bytes");
  }
  if (spec.num_tokens == 0)
    throw Error(StatusCode::kInvalid, "offer '" + spec.id + "' has no tokens");
  if (!(spec.lease > 0) || spec.consumers == 0) {
    throw Error(StatusCode::kInvalid,
                "offer '" + spec.id + "': lease and consumers must be positive");
  }
  if (core.offer_ids.contains(spec.id) || core.offers.contains(spec.generation)) {
    throw Error(StatusCode::kInvalid,
                "offer '" + spec.id + "' is open already: release it first, or use another id");
  }
  if (core.history.contains(spec.generation)) {
    throw Error(StatusCode::kInvalid,
                "offer '" + spec.id + "': its generation was used before; draw a new one");
  }
  const uint64_t token_end = uint64_t{spec.table.first_token} + spec.num_tokens;
  if (token_end > UINT32_MAX)
    throw Error(StatusCode::kInvalid, "offer '" + spec.id + "' ends beyond 2^32 tokens");
  const CacheLayout& layout = cache->second->layout;
  spec.table.validate(layout, spec.table.first_token, static_cast<uint32_t>(token_end),
                      /*unique=*/false);

  auto offer = std::make_shared<OfferState>();
  offer->core = core_;
  offer->handle = core.next_handle++;
  offer->id = spec.id;
  offer->generation = spec.generation;
  offer->cache = cache->second;
  offer->table = spec.table;
  offer->token_end = static_cast<uint32_t>(token_end);
  const bool ready = spec.ready && !event;
  offer->ready.assign(layout.layers.size(), ready);
  offer->ready_left = ready ? 0 : static_cast<uint32_t>(layout.layers.size());
  offer->consumers = spec.consumers;
  offer->lease = to_duration(spec.lease);
  offer->began = Clock::now();
  offer->lease_end = offer->began + offer->lease;
  ++offer->cache->users;
  core.offers[offer->generation] = offer;
  core.offer_ids[offer->id] = offer->generation;
  core.unreleased[offer->handle] = offer;
  arm_lease(core, offer);
  if (event) mark_later(offer, 0, static_cast<uint32_t>(layout.layers.size()), event);
  core.recorder.add(TraceKind::kOffer, offer->generation, {.name = offer->id});

  if (auto early = core.waiting.extract(offer->generation)) {
    // Fetches first: they may know of more consumers than there are declines.
    for (const bool declines : {false, true}) {
      for (const auto& serve : early.mapped()) {
        if (serve->declines == declines) begin_serving(core, serve, offer);
      }
    }
    start_packs(core);
  }
  return Offer(offer);
}

void Agent::reject(const std::string& id, const Generation& generation, const std::string& reason) {
  AgentCore& core = *core_;
  core.check_fork();
  Guard guard(core);
  core.check_open();
  if (core.history.contains(generation)) return;
  const Status told{StatusCode::kWithdrawn,
                    "offer '" + id + "' was withdrawn" + (reason.empty() ? "" : ": " + reason)};
  if (const auto open = core.offers.find(generation); open != core.offers.end()) {
    const auto offer = open->second;
    return end_offer(core, offer, told);
  }
  remember(core, generation, told);
  if (auto early = core.waiting.extract(generation)) {
    for (const auto& serve : early.mapped()) answer_ended(core, serve, told);
  }
}

const std::string& Offer::id() const { return state_->id; }
const Generation& Offer::generation() const { return state_->generation; }
uint64_t Offer::handle() const { return state_->handle; }

void Offer::mark_ready(uint32_t layer, void* stream) {
  AgentCore& core = *state_->core;
  core.check_fork();
  if (layer >= state_->ready.size()) {
    throw Error(StatusCode::kInvalid, "offer '" + state_->id + "': there is no layer " +
                                          std::to_string(layer) + ", the cache has " +
                                          std::to_string(state_->ready.size()));
  }
  mark_layers(state_, layer, layer + 1, stream);
}

void Offer::mark_all_ready(void* stream) {
  state_->core->check_fork();
  mark_layers(state_, 0, static_cast<uint32_t>(state_->ready.size()), stream);
}

void Offer::release() {
  AgentCore& core = *state_->core;
  core.check_fork();
  Guard guard(core);
  end_offer(core, state_,
            {StatusCode::kCancelled, "offer '" + state_->id + "' was released by its owner"});
}

bool Offer::released() const {
  state_->core->check_fork();
  Guard guard(*state_->core);
  return state_->released;
}

Status Offer::outcome() const {
  state_->core->check_fork();
  Guard guard(*state_->core);
  return state_->outcome;
}

bool Offer::wait(double timeout) const {
  state_->core->check_fork();
  Guard guard(*state_->core);
  return state_->changed.wait_for(guard.lock(), to_duration(timeout),
                                  [&] { return state_->released || state_->left; });
}

int Offer::event_fd() {
  state_->core->check_fork();
  Guard guard(*state_->core);
  if (!state_->event) {
    state_->event = make_event();
    if (state_->released || state_->left) signal_event(state_->event);
  }
  return state_->event.get();
}

}  // namespace kvxfer
