// From the blocks of an offer to a slot of its consumer, chunk by chunk.

#include <optional>
#include <utility>

#include "engine/core.h"

namespace kvxfer {
namespace {

bool is_staged(const Peer& peer) { return peer.link->mapped_arena().empty(); }

// Whether a chunk can be packed now. There is one more than there are workers, so that a worker
// that is done finds the next chunk waiting. If it has to be staged, not when all slots are taken,
// or when the peer has its share: a consumer that reads slowly must not hold up the others.
bool has_room(const AgentCore& core, const Turn& turn) {
  const auto& [owner, direct, gpu] = turn;
  const Peer& peer = *owner;
  if (gpu != nullptr ? gpu->packing > kGpuLanes : core.packing > core.options.threads) return false;
  if (direct || !is_staged(peer)) return true;
  return core.staged < core.staging->num_slots() && peer.staged < core.staging->num_slots() / 2;
}

void unreserve_staging(AgentCore& core, Peer& peer) {
  --core.staged;
  --peer.staged;
}

// The slot for a reservation: the one that this thread used last, if it is free, for another core
// would have to fetch every line of it out of this one's cache.
uint32_t take_staging(AgentCore& core) {
  const Guard guard(core);
  return core.staging->take_again().value();
}

// Fills the slot or the staging memory; what fails there ends the serve.
PackedChunk fill(AgentCore& core, const Serve& serve, uint32_t chunk, std::byte* wire, bool staged,
                 std::optional<std::string>& failure) {
  try {
    return serve.plan->pack(chunk, wire, serve.request.generation, serve.request.with_digest != 0,
                            /*stream=*/!staged, serve.offer->cache->packer(),
                            serve.gpu_slots != nullptr ? WireIn::kGpu : WireIn::kHost);
  } catch (const std::exception& error) {
    failure = "producer '" + core.options.name + "' could not pack chunk " + std::to_string(chunk) +
              ": " + error.what();
    return {};
  }
}

// Where a chunk goes that is not staged.
std::byte* slot_of(const Serve& serve, uint32_t slot) {
  const uint64_t bytes = serve.peer->slot_bytes;
  if (serve.gpu_slots != nullptr) return serve.gpu_slots + slot * gpu_slot_stride(bytes);
  return serve.peer->link->mapped_arena().data() + slot * bytes;
}

void pack_chunk(AgentCore& core, const std::shared_ptr<Serve>& serve, uint32_t chunk, uint32_t slot,
                bool staged) {
  const auto& link = serve->peer->link;
  const uint64_t offset = static_cast<uint64_t>(slot) * serve->peer->slot_bytes;
  const uint32_t staging_slot = staged ? take_staging(core) : 0;
  std::byte* wire_bytes = staged ? core.staging->slot(staging_slot) : slot_of(*serve, slot);
  std::optional<std::string> failure;
  // Then nothing is launched any more that writes into the peer's memory.
  const GpuDevice* gpu = serve->gpu_slots != nullptr ? serve->offer->cache->gpu.get() : nullptr;
  const bool was_given_up = gpu != nullptr && gpu->given_up();
  const TimePoint began = Clock::now();
  const PackedChunk packed = fill(core, *serve, chunk, wire_bytes, staged, failure);
  const uint64_t fetch_id = serve->request.fetch_id;
  const wire::Bytes message =
      wire::Commit{fetch_id, chunk, slot, packed.bytes, packed.digest}.encode();
  core.recorder.add(TraceKind::kPack, serve->request.generation,
                    {.peer = serve->peer->id,
                     .chunk = chunk,
                     .bytes = packed.bytes,
                     .began = began,
                     .code = failure ? StatusCode::kNoResources : StatusCode::kOk});
  uint64_t token = 0;
  {
    Guard guard(core);
    --packing(core, *serve);
    --serve->offer->reading;
    if (failure && gpu != nullptr && !was_given_up && gpu->given_up()) {
      // Not refused: that would promise that nothing is written any more.
      drop_peer(core, serve->peer, {StatusCode::kNoResources, *failure});
    } else if (failure) {
      refuse(core, serve, {StatusCode::kNoResources, *failure});
    } else {
      core.counters.bytes_sent += serve->plan->memory_bytes(chunk);
      core.counters.wire_bytes_sent += packed.bytes;
    }
    if (serve->ended) {
      if (staged) {
        core.staging->give_back(staging_slot);
        unreserve_staging(core, *serve->peer);
      }
      release_if_unread(core, *serve->offer);
      land_flight(core, serve);
    } else if (staged) {
      token = core.next_token++;
      core.writing.emplace(token, Writing{serve, staging_slot, chunk, packed.bytes, Clock::now()});
    } else {
      link->send(message);
      core.recorder.add(TraceKind::kCommit, serve->request.generation,
                        {.peer = serve->peer->id, .chunk = chunk, .bytes = packed.bytes});
      land_flight(core, serve);
    }
    start_packs(core);
  }
  // Outside the mutex: the transport may copy a megabyte to the kernel in here.
  if (token != 0) link->write({wire_bytes, packed.bytes}, offset, message, token);
}

}  // namespace

uint32_t& packing(AgentCore& core, const Serve& serve) {
  GpuDevice* gpu = serve.offer->cache->gpu.get();
  return gpu != nullptr ? gpu->packing : core.packing;
}

void start_packs(AgentCore& core) {
  // Who waits for staging is passed over: on_written() comes back here.
  while (const auto next =
             core.serve_queue.pop([&](const Turn& turn) { return has_room(core, turn); })) {
    const auto& serve = *next;
    serve->queued = false;
    if (serve->ended || serve->ready.empty() || serve->credits.empty()) continue;
    const bool direct = serve->direct.has_value();
    const bool staged = !direct && is_staged(*serve->peer);
    if (staged) {
      ++core.staged;
      ++serve->peer->staged;
    }
    auto& [begin, end] = serve->ready.front();
    const uint32_t chunk = begin++;
    if (begin == end) serve->ready.pop_front();
    if (serve->asked > 0) --serve->asked;
    const uint32_t slot = serve->credits.front();
    serve->credits.pop_front();
    ++serve->in_flight;
    ++serve->offer->reading;
    ++packing(core, *serve);
    queue_serve(core, serve);
    run_job(core, *serve->offer->cache, serve->plan->memory_bytes(chunk),
            [&core, serve = serve, chunk, slot, staged, direct] {
              direct ? write_blocks(core, serve, chunk, slot)
                     : pack_chunk(core, serve, chunk, slot, staged);
            });
  }
}

void Peer::on_written(Link&, uint64_t token, bool ok) {
  Guard guard(*core);
  auto writing = core->writing.extract(token);
  if (!writing) return;
  const Writing& done = writing.mapped();
  if (done.staging_slot) {
    core->staging->give_back(*done.staging_slot);
    unreserve_staging(*core, *this);
  } else {
    --done.serve->offer->reading;
    release_if_unread(*core, *done.serve->offer);
  }
  core->recorder.add(TraceKind::kWrite, done.serve->request.generation,
                     {.peer = id,
                      .chunk = done.chunk,
                      .bytes = done.bytes,
                      .began = done.began,
                      .code = ok ? StatusCode::kOk : StatusCode::kPeerLost});
  land_flight(*core, done.serve);
  start_packs(*core);
}

}  // namespace kvxfer
