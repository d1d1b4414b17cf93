#include <algorithm>
#include <cstdio>
#include <utility>

#include "engine/codec_choice.h"
#include "engine/codecs.h"
#include "engine/core.h"

namespace kvxfer {
namespace {

uint64_t part_bytes(const FetchState& fetch, const FetchPart& part) {
  uint64_t row_elements = 0;
  for (const PlaneSpec& plane : fetch.cache->layout.planes) row_elements += plane.content;
  return part.layers.size() * uint64_t{part.head_end - part.head_begin} * fetch.spec.num_tokens *
         row_elements * element_bytes(fetch.cache->layout.element);
}

std::string what_of(const FetchState& fetch) {
  return std::string(fetch.declines ? "decline" : "fetch") + " of offer '" + fetch.spec.offer_id +
         "'";
}

// How far a fetch got, for the message of a time-out.
std::string progress(const FetchState& fetch) {
  for (const auto& part : fetch.parts) {
    if (part->done) continue;
    const std::string who = "'" + part->peer->name + "'";
    if (part->peer->state == Peer::kConnecting) return "still connecting to " + who;
    if (part->peer->state == Peer::kGreeting)
      return "connected to " + who + ", which has not said HELLO yet";
    if (part->accepted && part->slots.empty() && part->wanted > part->granted)
      return "still waiting for a free slot of the staging arena (raise arena_bytes, or fetch less "
             "at once)";
    if (fetch.declines) return who + " has not noted it: its offer was not made in time";
    if (!part->accepted) return who + " has not accepted the fetch: its offer was not made in time";
    const uint32_t chunks = part->plan->num_chunks();
    return std::to_string(chunks - part->chunks_left) + " of " + std::to_string(chunks) +
           " chunks arrived from " + who;
  }
  return "all parts arrived";
}

// Has the jobs that write into the blocks wait until the caller's GPU has let go of them.
void close_gate(AgentCore& core, const std::shared_ptr<FetchState>& fetch,
                const std::shared_ptr<GpuEvent>& event) {
  fetch->gated = true;
  const auto opened = [fetch](const std::string& failure) {
    AgentCore& owner = *fetch->core;
    Guard guard(owner);
    if (failure.empty()) {
      open_gate(owner, *fetch);
      return grant_slots(owner);
    }
    fail_fetch(owner, fetch,
               {StatusCode::kNoResources,
                what_of(*fetch) + ": the stream that has the blocks: " + failure});
  };
  // The fetch fails before.
  const Duration late = to_duration(fetch->spec.timeout) + std::chrono::seconds(1);
  core.gpu_gate.wait(event, fetch->started + late, opened);
}

}  // namespace

void run_unpack(AgentCore& core, const std::shared_ptr<FetchState>& fetch, uint64_t bytes,
                std::function<void()> job) {
  if (fetch->gated) {
    fetch->parked.push_back(std::move(job));
  } else {
    run_job(core, *fetch->cache, bytes, std::move(job));
  }
}

void open_gate(AgentCore& core, FetchState& fetch) {
  fetch.gated = false;
  for (auto& job : std::exchange(fetch.parked, {})) run_job(core, *fetch.cache, 0, std::move(job));
  for (const auto& part : fetch.parts) {
    if (part->direct) feed(core, part, window_of(core, *part));
  }
}

void launch(AgentCore& core, const std::shared_ptr<FetchState>& fetch) {
  set_timer(core, fetch->timer, fetch->started + to_duration(fetch->spec.timeout), [&core, fetch] {
    char limit[32];
    std::snprintf(limit, sizeof(limit), "%.3g s", fetch->spec.timeout);
    fail_fetch(core, fetch,
               {StatusCode::kTimeout,
                what_of(*fetch) + " did not end within " + limit + ": " + progress(*fetch)});
  });
  const auto parts = fetch->parts;
  for (const auto& part : parts) {
    Peer& peer = *part->peer;
    fetch->report.peers.push_back(peer.name);
    if (peer.state == Peer::kClosing) {
      fail_part(core, part, peer.failure);
    } else if (peer.state == Peer::kReady) {
      start_part(core, part);
    } else {
      peer.pending.push_back(part);
    }
    if (fetch->ending) break;
  }
  if (core.arena) grant_slots(core);
}

Fetch Agent::fetch(const FetchSpec& spec) {
  AgentCore& core = *core_;
  core.check_fork();
  const auto event = first_event(core, spec.cache, spec.stream, /*ready=*/true);
  Guard guard(core);
  core.check_open();
  const auto invalid = [&](const std::string& what) -> Error {
    return Error(StatusCode::kInvalid, "fetch of offer '" + spec.offer_id + "': " + what);
  };
  const auto cache = core.caches.find(spec.cache);
  if (cache == core.caches.end())
    throw invalid("the cache is not registered with agent '" + core.options.name + "'");
  const CacheLayout& layout = cache->second->layout;
  const uint64_t token_end = uint64_t{spec.table.first_token} + spec.num_tokens;
  if (spec.num_tokens == 0 || token_end > UINT32_MAX)
    throw invalid("it asks for no tokens, or for too many");
  if (spec.offer_id.empty() || spec.offer_id.size() > wire::kMaxName) {
    throw invalid("an offer's id has 1 to " + std::to_string(wire::kMaxName) + " bytes");
  }
  if (spec.parts.empty()) throw invalid("it names no producer");
  if (spec.gpu_direct_only && !cache->second->gpu) {
    throw invalid("gpudirect-rdma is required, and the cache is in the host's memory");
  }
  if (!(spec.timeout > 0)) throw invalid("its timeout must be positive");
  spec.table.validate(layout, spec.table.first_token, static_cast<uint32_t>(token_end),
                      /*unique=*/true);
  for (const FetchPart& part : spec.parts) {
    if (!core.peers.contains(part.peer)) {
      throw Error(StatusCode::kPeerLost, "fetch of offer '" + spec.offer_id + "': peer " +
                                             std::to_string(part.peer) +
                                             " is not connected (any more)");
    }
    if (part.layers.empty() || part.head_begin >= part.head_end ||
        part.head_begin < layout.first_head ||
        part.head_end > layout.first_head + layout.num_heads) {
      throw invalid("heads [" + std::to_string(part.head_begin) + ", " +
                    std::to_string(part.head_end) + ") are not in the cache, which holds [" +
                    std::to_string(layout.first_head) + ", " +
                    std::to_string(layout.first_head + layout.num_heads) + ")");
    }
    for (uint32_t layer : part.layers) {
      if (layer >= layout.layers.size())
        throw invalid("layer " + std::to_string(layer) + " is not in the cache");
    }
  }
  try {
    check_codec(spec.codec, layout.planes);
  } catch (const Error& error) {
    throw invalid(error.what());
  }
  ensure_arena(core);

  auto fetch = std::make_shared<FetchState>();
  fetch->core = core_;
  fetch->handle = core.next_handle++;
  fetch->spec = spec;
  fetch->nothing_to_code =
      spec.codec.codec != Codec::kRaw && std::max(spec.codec.raw_until, spec.table.first_token) >=
                                             std::min<uint64_t>(spec.codec.raw_from, token_end);
  if (fetch->nothing_to_code) fetch->spec.codec = {};
  fetch->cache = cache->second;
  fetch->started = Clock::now();
  fetch->parts_left = static_cast<uint32_t>(spec.parts.size());
  ++fetch->cache->users;
  core.fetches[fetch->handle] = fetch;
  if (event) close_gate(core, fetch, event);
  for (const FetchPart& spec_part : spec.parts) {
    auto part = std::make_shared<Part>();
    part->fetch = fetch;
    part->peer = core.peers.at(spec_part.peer);
    part->spec = spec_part;
    part->memory_bytes = part_bytes(*fetch, spec_part);
    fetch->parts.push_back(part);
  }
  core.recorder.add(TraceKind::kFetch, spec.generation, {.name = spec.offer_id});
  launch(core, fetch);
  return Fetch(fetch);
}

uint64_t Fetch::handle() const { return state_->handle; }

bool Fetch::done() const {
  state_->core->check_fork();
  Guard guard(*state_->core);
  return state_->done;
}

Status Fetch::status() const {
  state_->core->check_fork();
  Guard guard(*state_->core);
  return state_->status;
}

bool Fetch::wait(double timeout) const {
  state_->core->check_fork();
  Guard guard(*state_->core);
  return state_->changed.wait_for(guard.lock(), to_duration(timeout), [&] { return state_->done; });
}

void Fetch::cancel(bool for_good) {
  AgentCore& core = *state_->core;
  core.check_fork();
  Guard guard(core);
  if (!state_->done) {
    fail_fetch(core, state_, {StatusCode::kCancelled, what_of(*state_) + " was cancelled"});
    // Copies of single chunks are waited for and, on the direct path, the fence, which has a limit.
    state_->changed.wait(guard.lock(), [&] { return state_->done; });
  }
  if (for_good) give_up(core, *state_);
}

int Fetch::event_fd() {
  state_->core->check_fork();
  Guard guard(*state_->core);
  if (!state_->event) {
    state_->event = make_event();
    if (state_->done) signal_event(state_->event);
  }
  return state_->event.get();
}

FetchReport Fetch::report() const {
  state_->core->check_fork();
  Guard guard(*state_->core);
  FetchReport report = state_->report;
  if (report.path.empty()) report.path = "staged";
  const TimePoint end = state_->done ? state_->ended : Clock::now();
  report.seconds = std::chrono::duration<double>(end - state_->started).count();
  return report;
}

}  // namespace kvxfer
