// The producer's side of the direct path: from the blocks of an offer straight into the consumer's.

#include <algorithm>
#include <utility>

#include "engine/core.h"

namespace kvxfer {
namespace {

// Below this a work request takes more memory than what it moves.
constexpr uint64_t kLeastRun = 16;
constexpr uint64_t kMostPieces = 1u << 16;  // of a fetch: counting them holds up everything else

// Runs on the registrar, without the mutex.
void serve_waiting(AgentCore& core, Peer& peer, CacheId cache, Registered made) {
  if (!made.memory) {
    made.problem = "'" + core.options.name + "' cannot register its cache: " + made.problem;
  }
  std::map<uint64_t, std::shared_ptr<Serve>> serves;
  {
    Guard guard(core);
    if (const auto entry = peer.sources.find(cache); entry != peer.sources.end()) {
      entry->second = std::move(made);
    }
    serves = peer.serves;
  }
  for (const auto& [id, serve] : serves) {  // counting its runs takes a while: others get turns
    Guard guard(core);
    if (std::exchange(serve->registering, false) && !serve->ended) find_offer(core, serve);
  }
}

// Unless that is done, or under way. False: the agent is closing.
bool register_source(AgentCore& core, const std::shared_ptr<Peer>& peer,
                     const std::shared_ptr<Cache>& cache) {
  if (!peer->sources.try_emplace(cache->id).second) return true;
  if (pin_cache(core, cache, peer, Link::DirectUse::kSource,
                [&core, peer, id = cache->id](Registered made) {
                  serve_waiting(core, *peer, id, std::move(made));
                })) {
    return true;
  }
  peer->sources.erase(cache->id);
  return false;
}

}  // namespace

std::optional<std::string> choose_path(AgentCore& core, Serve& serve, const OfferState& offer,
                                       CopyPlan target) {
  Peer& peer = *serve.peer;
  const KnownLayout& known = peer.layouts.at(serve.request.cache_id);
  const auto& to = known.memory;
  if (!known.problem.empty()) return known.problem;
  if (!to) throw Error(StatusCode::kProtocol, "FETCH_DIRECT without MEMORY");
  if (offer.cache->gpu && core.options.gpu_direct == GpuDirect::kOff) {
    return "the producer's cache is in GPU memory, and its gpudirect is set to off";
  }
  const ChunkPlan& plan = *serve.plan;
  const bool forced = serve.path == wire::FetchDirect::kDirect ||
                      (core.options.gpu_direct_only && offer.cache->gpu);
  const uint64_t least_run = forced ? kLeastRun : kAutoRun;
  const uint64_t most = std::min(plan.wire_bytes() / least_run, kMostPieces);
  const uint64_t pieces = plan.count_pieces(target, most + 1);
  const std::string run =
      forced ? std::to_string(kLeastRun) + " bytes" : std::to_string(kAutoRun >> 10) + " KiB";
  if (pieces > kMostPieces) return "more than " + std::to_string(kMostPieces) + " runs";
  if (pieces > most) {
    return "runs of less than " + run + " on average" + (forced ? "" : ": packing is faster");
  }
  const auto source = peer.sources.find(offer.cache->id);
  if (source == peer.sources.end() || !source->second.ready()) {
    const Cache& cache = *offer.cache;
    if (forced || !cache.gpu ||
        !cache.gpu->trials.ahead(core.options.gpu_direct, *peer.link, Link::DirectUse::kSource)) {
      return std::nullopt;
    }
    // A trial takes seconds, which is longer than most fetches take through the host's memory.
    register_source(core, serve.peer, offer.cache);
    return "whether adapters reach the memory of the producer's GPU is being tried";
  }
  if (!source->second.memory) return source->second.problem;
  serve.direct.emplace(DirectServe{std::move(target), pieces, source->second.memory, to});
  const std::string& by = source->second.by;
  return (forced ? "as set" : "runs of at least " + run + " on average") +
         (by.empty() ? "" : "; read from the producer's GPU " + by);
}

void register_and_serve(AgentCore& core, const std::shared_ptr<Serve>& serve,
                        const std::shared_ptr<OfferState>& offer) {
  serve->plan.reset();  // is made again then, and counted
  serve->registering = true;
  if (register_source(core, serve->peer, offer->cache)) return;
  refuse(core, serve, {StatusCode::kClosed, "agent '" + core.options.name + "' is closing"});
}

void write_blocks(AgentCore& core, const std::shared_ptr<Serve>& serve, uint32_t chunk,
                  uint32_t slot) {
  const wire::Fetch& request = serve->request;
  const DirectServe& direct = *serve->direct;
  const TimePoint began = Clock::now();
  const auto bytes = static_cast<uint32_t>(serve->plan->memory_bytes(chunk));
  std::vector<DirectPiece> pieces;
  wire::Commit commit{request.fetch_id, chunk, slot, bytes, {}};
  std::optional<std::string> failure;
  try {
    pieces = serve->plan->pieces(chunk, direct.target);
    if (request.with_digest != 0) {
      commit.digest =
          serve->plan->digest_in_place(chunk, request.generation, serve->offer->cache->packer());
    }
  } catch (const std::exception& error) {  // std::bad_alloc
    failure = "producer '" + core.options.name + "' could not write chunk " +
              std::to_string(chunk) + ": " + error.what();
  }
  core.recorder.add(TraceKind::kPack, request.generation,
                    {.peer = serve->peer->id,
                     .chunk = chunk,
                     .bytes = bytes,
                     .began = began,
                     .code = failure ? StatusCode::kNoResources : StatusCode::kOk});
  uint64_t token = 0;
  {
    Guard guard(core);
    --packing(core, *serve);
    if (failure) refuse(core, serve, {StatusCode::kNoResources, *failure});
    if (serve->ended) {
      --serve->offer->reading;
      release_if_unread(core, *serve->offer);
      land_flight(core, serve);
    } else {
      core.counters.bytes_sent += bytes;
      core.counters.wire_bytes_sent += bytes;
      token = core.next_token++;
      core.writing.emplace(token, Writing{serve, std::nullopt, chunk, bytes, Clock::now()});
    }
    start_packs(core);
  }
  if (token == 0) return;
  serve->peer->link->write_direct(std::move(pieces), direct.from, direct.to, commit.encode(),
                                  token);
}

}  // namespace kvxfer
