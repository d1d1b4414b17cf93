// Fetches that are not made: the consumer's side.

#include <utility>

#include "engine/core.h"

namespace kvxfer {
namespace {

std::shared_ptr<FetchState> make_decline(const std::shared_ptr<AgentCore>& core,
                                         const DeclineSpec& spec) {
  auto decline = std::make_shared<FetchState>();
  decline->core = core;
  decline->handle = core->next_handle++;
  decline->declines = true;
  decline->spec.offer_id = spec.offer_id;
  decline->spec.generation = spec.generation;
  decline->spec.cache = spec.cache;
  decline->spec.timeout = spec.timeout;
  decline->started = Clock::now();
  for (const auto& [peer, consumers] : spec.parts) {
    auto part = std::make_shared<Part>();
    part->fetch = decline;
    part->peer = core->peers.at(peer);
    part->spec.peer = peer;
    part->spec.consumers = consumers;
    decline->parts.push_back(std::move(part));
  }
  decline->parts_left = static_cast<uint32_t>(decline->parts.size());
  core->fetches[decline->handle] = decline;
  return decline;
}

}  // namespace

Fetch Agent::decline(const DeclineSpec& spec) {
  AgentCore& core = *core_;
  core.check_fork();
  Guard guard(core);
  core.check_open();
  const auto invalid = [&](const std::string& what) -> Error {
    return Error(StatusCode::kInvalid, "decline of offer '" + spec.offer_id + "': " + what);
  };
  if (spec.offer_id.empty() || spec.offer_id.size() > wire::kMaxName) {
    throw invalid("an offer's id has 1 to " + std::to_string(wire::kMaxName) + " bytes");
  }
  if (!core.caches.contains(spec.cache))
    throw invalid("the cache is not registered with agent '" + core.options.name + "'");
  if (spec.parts.empty()) throw invalid("it names no producer");
  if (!(spec.timeout > 0)) throw invalid("its timeout must be positive");
  std::set<PeerId> peers;
  for (const DeclineSpec::Part& part : spec.parts) {
    if (!peers.insert(part.peer).second)
      throw invalid("it names peer " + std::to_string(part.peer) + " twice");
    if (!core.peers.contains(part.peer)) {
      throw Error(StatusCode::kPeerLost, "decline of offer '" + spec.offer_id + "': peer " +
                                             std::to_string(part.peer) +
                                             " is not connected (any more)");
    }
  }
  const auto decline = make_decline(core_, spec);
  launch(core, decline);
  return Fetch(decline);
}

void give_up(AgentCore& core, FetchState& fetch) {
  if (fetch.declines || fetch.status.ok() || core.closed) return;
  if (std::exchange(fetch.given_up, true)) return;
  DeclineSpec spec{
      fetch.spec.offer_id, fetch.spec.generation, fetch.spec.cache, fetch.spec.timeout, {}};
  std::set<PeerId> told;
  for (const FetchPart& part : fetch.spec.parts) {
    if (core.peers.contains(part.peer) && told.insert(part.peer).second)
      spec.parts.push_back({part.peer, part.consumers});
  }
  if (spec.parts.empty()) return;  // all are lost, and their offers know by the lease
  const auto decline = make_decline(fetch.core, spec);
  decline->given_up = true;
  launch(core, decline);
}

void send_decline(Part& part) {
  const FetchState& decline = *part.fetch;
  wire::Decline message;
  message.fetch_id = part.id;
  message.offer_id = decline.spec.offer_id;
  message.generation = decline.spec.generation;
  message.cache_id = decline.spec.cache;
  message.consumers = part.spec.consumers;
  message.given_up = decline.given_up;
  part.sent = true;
  part.peer->link->send(message.encode());
}

void end_declined_part(AgentCore& core, const std::shared_ptr<Part>& part, Status status) {
  const auto decline = part->fetch;
  if (decline->ending || std::exchange(part->done, true)) return;
  part->peer->parts.erase(part->id);
  if (decline->status.ok()) decline->status = std::move(status);
  if (--decline->parts_left > 0) return;
  decline->ending = true;
  complete(core, decline);
}

void handle_declined(AgentCore& core, Peer& peer, uint64_t fetch_id) {
  const auto found = peer.parts.find(fetch_id);
  if (found == peer.parts.end()) return;
  if (!found->second->fetch->declines)
    throw Error(StatusCode::kProtocol, "DECLINED answers a FETCH");
  end_declined_part(core, std::shared_ptr(found->second), {});
}

}  // namespace kvxfer
