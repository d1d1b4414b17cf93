// What peers make this agent keep: descriptions of caches, and fetches until they end.

#include <algorithm>
#include <cstdio>
#include <utility>

#include "engine/core.h"

namespace kvxfer {
namespace {

constexpr uint64_t kPeersTogether = 8;  // as many times what one may
constexpr size_t kMaxServesPerPeer = 4096;
constexpr double kShortestHint = 0.1, kLongestHint = 5;  // seconds

void count(AgentCore& core, Peer& peer, uint64_t bytes) {
  peer.held += bytes;
  core.held += bytes;
}

void discount(AgentCore& core, Peer& peer, uint64_t bytes) {
  peer.held -= bytes;
  core.held -= bytes;
}

std::string limit(uint64_t bytes, const char* times) {
  return std::to_string(bytes) + " bytes (" + times + "peer_bytes)";
}

// Why a peer may not have so much more kept for its fetches; "" when it may.
std::string over_budget(const AgentCore& core, const Peer& peer, uint64_t bytes) {
  const uint64_t most = core.options.peer_bytes;
  if (peer.serves.size() > kMaxServesPerPeer) {
    return std::to_string(kMaxServesPerPeer) + " fetches of this peer are open";
  }
  if (peer.held + bytes > most) {
    return "the layouts and open fetches of this peer take " + limit(most, "");
  }
  if (core.held + bytes > kPeersTogether * most) {
    return "the layouts and open fetches of all peers take " +
           limit(kPeersTogether * most, "8 times ");
  }
  return "";
}

uint64_t bytes_of(const CacheLayout& layout) {
  uint64_t bytes = sizeof(KnownLayout) + layout.model.capacity() +
                   layout.views.capacity() * sizeof(PlaneView) +
                   layout.scales.capacity() * sizeof(float);
  for (const std::string& name : layout.layers) bytes += sizeof(name) + name.capacity();
  for (const PlaneSpec& plane : layout.planes) bytes += sizeof(plane) + plane.name.capacity();
  return bytes;
}

// There is no answer to LAYOUT that could say so: it costs the connection. So there is room for
// layouts even where fetches have taken all.
void check_room(const AgentCore& core, const Peer& peer, uint64_t bytes) {
  const uint64_t most = core.options.peer_bytes;
  if (peer.layout_bytes + bytes > most / 2) {
    throw Error(StatusCode::kNoResources,
                "no room for its cache: its layouts and keys take " + limit(most / 2, "half of "));
  }
  if (core.held + bytes > (kPeersTogether + 1) * most) {
    throw Error(StatusCode::kNoResources, "no room for its cache: all peers have " +
                                              limit((kPeersTogether + 1) * most, "9 times "));
  }
}

}  // namespace

void hold(AgentCore& core, Serve& serve, uint64_t bytes) {
  const uint64_t alone = serve.peer->layout_bytes + serve.held + bytes;
  if (alone > core.options.peer_bytes) {  // later it would fit no better
    throw Error(StatusCode::kNoResources,
                "'" + core.options.name + "' has no room for it: alone, with the layouts of this " +
                    "peer, it takes " + std::to_string(alone) + " bytes, more than " +
                    limit(core.options.peer_bytes, "") +
                    "; raise peer_bytes there, or fetch fewer tokens at once");
  }
  if (const std::string why = over_budget(core, *serve.peer, bytes); !why.empty()) {
    char seconds[16];
    std::snprintf(seconds, sizeof(seconds), "%.2g s", retry_seconds(core));
    throw Error(StatusCode::kBusy, "'" + core.options.name + "' has its hands full: " + why +
                                       "; try again in " + seconds + ", with fewer at once");
  }
  count(core, *serve.peer, bytes);
  serve.held += bytes;
}

void let_go(AgentCore& core, Serve& serve) {
  discount(core, *serve.peer, std::exchange(serve.held, 0));
  if (!serve.offer) return;
  const double took = std::chrono::duration<double>(Clock::now() - serve.began).count();
  core.serve_seconds += (took - core.serve_seconds) / 8;
}

uint64_t bytes_of(const Serve& serve) {
  const wire::Fetch& request = serve.request;
  return sizeof(Serve) + request.offer_id.capacity() +
         sizeof(uint32_t) *
             (request.layers.capacity() + 2 * request.slots.capacity() + serve.blocks.capacity());
}

uint64_t bytes_of_plans(const Serve& serve) {
  uint64_t bytes = serve.plan->plan_bytes();
  // The consumer may grant slots for all chunks at once: then their pieces are under way together,
  // here and in the link.
  if (serve.direct) {
    // Another LAYOUT of the cache takes the keys out of the peer's, but not from this serve.
    bytes += serve.peer->layouts.at(serve.request.cache_id).key_bytes;
    bytes += serve.direct->target.plan_bytes() + 2 * sizeof(DirectPiece) * serve.direct->pieces;
  }
  return bytes;
}

void keep_layout(AgentCore& core, Peer& peer, uint32_t cache_id, CacheLayout layout) {
  forget_layout(core, peer, cache_id);
  const uint64_t bytes = bytes_of(layout);
  check_room(core, peer, bytes);
  peer.layouts.emplace(cache_id,
                       KnownLayout{std::move(layout), bytes, 0, nullptr, {}});  // may throw
  count(core, peer, bytes);
  peer.layout_bytes += bytes;
}

void keep_keys(AgentCore& core, Peer& peer, const wire::Memory& memory) {
  const auto known = peer.layouts.find(memory.cache_id);
  if (!peer.direct || known == peer.layouts.end() || known->second.memory ||
      !known->second.problem.empty()) {
    throw Error(StatusCode::kProtocol,
                "MEMORY came twice, of a cache that is not known, or was not agreed on");
  }
  const uint64_t bytes = 2 * memory.keys.size();  // as the link keeps them
  try {
    check_room(core, peer, bytes);
  } catch (const Error& error) {
    known->second.problem = "'" + core.options.name + "' cannot keep its keys: " + error.what();
    return;
  }
  known->second.memory = peer.link->remote_memory(memory.keys);  // may throw
  known->second.bytes += bytes;
  known->second.key_bytes = bytes;
  count(core, peer, bytes);
  peer.layout_bytes += bytes;
}

void forget_layout(AgentCore& core, Peer& peer, uint32_t cache_id) {
  const auto known = peer.layouts.find(cache_id);
  if (known == peer.layouts.end()) return;
  discount(core, peer, known->second.bytes);
  peer.layout_bytes -= known->second.bytes;
  peer.layouts.erase(known);
  for (auto order = peer.orders.lower_bound({cache_id, 0, false});
       order != peer.orders.end() && order->first.remote == cache_id;) {
    order = peer.orders.erase(order);
  }
}

double retry_seconds(const AgentCore& core) {
  return std::clamp(core.serve_seconds, kShortestHint, kLongestHint);
}

}  // namespace kvxfer
