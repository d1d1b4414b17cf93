// From a slot of the arena into the blocks of its fetch, chunk by chunk.

#include <algorithm>
#include <utility>

#include "engine/core.h"

namespace kvxfer {
namespace {

// Whether the slot that a commit names was granted for its fetch, and nothing has come into it yet.
bool granted_for(const AgentCore& core, const Part& part, const wire::Commit& commit) {
  if (commit.slot >= core.slots.size() || commit.bytes > part.chunk_bytes) return false;
  const SlotInfo& slot = core.slots[commit.slot];
  return slot.state == SlotInfo::kGranted && slot.peer == part.peer->id && slot.fetch_id == part.id;
}

// The bytes are in the slot, and will be unpacked now: by the caller.
void claim_chunk(AgentCore& core, Part& part, const wire::Commit& commit) {
  const bool fits = part.accepted && commit.chunk < part.arrived.size() &&
                    !part.arrived[commit.chunk] && part.plan->can_have(commit.chunk, commit.bytes);
  if (!fits) {
    throw Error(StatusCode::kProtocol, "COMMIT of chunk " + std::to_string(commit.chunk) + " of " +
                                           std::to_string(commit.bytes) +
                                           " bytes, which is not expected");
  }
  part.arrived[commit.chunk] = true;
  core.slots[commit.slot].state = SlotInfo::kUnpacking;
  ++part.fetch->unpacking;
}

Status corrupt(const Part& part, const wire::Commit& commit) {
  return {StatusCode::kCorrupt,
          "chunk " + std::to_string(commit.chunk) + " (" + std::to_string(commit.bytes) +
              " bytes) of offer '" + part.fetch->spec.offer_id + "' from '" + part.peer->name +
              "' over " + part.peer->link->transport() +
              " does not match its digest: the blocks must not be used; fetch again"};
}

// What is wrong with a chunk that was unpacked, if anything.
Status judge(const AgentCore& core, const Part& part, const wire::Commit& commit,
             const UnpackedChunk& chunk) {
  if (core.options.digest && chunk.digest != commit.digest) return corrupt(part, commit);
  if (chunk.loss.inexact == 0) return {};
  return {StatusCode::kMismatch,
          std::to_string(chunk.loss.inexact) + " elements of chunk " +
              std::to_string(commit.chunk) + " of offer '" + part.fetch->spec.offer_id + "' are " +
              element_name(part.producer_element) + " in the cache of '" + part.peer->name +
              "' and have no equal in this cache's " +
              element_name(part.fetch->cache->layout.element) +
              " and scale: 8-bit floats are converted exactly or not at all; fetch into a cache of "
              "16-bit floats, or of the same type and scale"};
}

// Whether what is in the slot does not match its digest, as far as that can be found out.
bool is_damaged(const AgentCore& core, const Part& part, const wire::Commit& commit) {
  try {
    const std::byte* bytes = core.arena->slot(commit.slot);
    std::vector<std::byte> copy;
    if (part.gpu) {
      copy.resize(commit.bytes);
      part.fetch->cache->packer()->read(copy.data(), part.gpu->slot(commit.slot), commit.bytes);
      bytes = copy.data();
    }
    return part.plan->digest_of(commit.chunk, bytes, commit.bytes, part.fetch->spec.generation) !=
           commit.digest;
  } catch (const std::exception&) {  // the device, or std::bad_alloc
    return false;
  }
}

// The same for one that could not be unpacked.
Status judge_failure(const AgentCore& core, const Part& part, const wire::Commit& commit,
                     const Error& error) {
  // What was damaged on its way no longer matches its digest; else its producer wrote it so.
  if (core.options.digest && !part.direct && is_damaged(core, part, commit)) {
    return corrupt(part, commit);
  }
  return {error.code(), "'" + part.peer->name + "': chunk " + std::to_string(commit.chunk) +
                            " of offer '" + part.fetch->spec.offer_id + "': " + error.what()};
}

Status unpack_commit(const AgentCore& core, const Part& part, const wire::Commit& commit,
                     UnpackedChunk& chunk) {
  try {
    if (part.direct) {  // it is where it belongs
      const Cache& cache = *part.fetch->cache;
      if (cache.gpu) settle_writes(core, part);
      if (!core.options.digest) return {};
      chunk.digest =
          part.plan->digest_in_place(commit.chunk, part.fetch->spec.generation, cache.packer());
      return judge(core, part, commit, chunk);
    }
    chunk = part.plan->unpack(
        commit.chunk, part.gpu ? part.gpu->slot(commit.slot) : core.arena->slot(commit.slot),
        commit.bytes, part.fetch->spec.generation, core.options.digest, part.fetch->cache->packer(),
        part.gpu ? WireIn::kGpu : WireIn::kHost);
    return judge(core, part, commit, chunk);
  } catch (const Error& error) {
    return judge_failure(core, part, commit, error);
  } catch (const std::exception& error) {  // std::bad_alloc
    return {StatusCode::kNoResources,
            std::string("a chunk could not be unpacked here: ") + error.what()};
  }
}

void count_chunk(AgentCore& core, Part& part, const wire::Commit& commit,
                 const UnpackedChunk& chunk) {
  const uint64_t bytes = part.plan->memory_bytes(commit.chunk);
  core.counters.bytes_received += bytes;
  core.counters.wire_bytes_received += commit.bytes;
  FetchReport& report = part.fetch->report;
  report.bytes += bytes;
  report.wire_bytes += commit.bytes;
  report.exceptions += chunk.exceptions;
  report.clamped += chunk.loss.clamped;
  ++report.chunks;
}

// A chunk of the part was damaged in a GPU's slot. There are machines where GPUs lose what is
// written to others, so that the same would happen again: later ones of that link don't ask for it.
void distrust_gpu_slots(const Part& part) {
  const auto exposed = part.peer->exposed.find(part.fetch->cache->gpu.get());
  if (exposed == part.peer->exposed.end()) return;
  exposed->second.problem = "a chunk from '" + part.peer->name +
                            "' was damaged on its way from GPU to GPU, so they go through the "
                            "host's memory until it is connected anew";
}

// What adapters wrote into a GPU is not there, or could not be settled, and no digest would tell
// whether it is. As with a registration that leads nowhere, or where a rail is lost, that would
// happen to later fetches over that link, too, so they are staged. The memory stays registered:
// other fetches may be under way.
void distrust_direct(const Part& part, const Status& status) {
  const auto target = part.peer->targets.find(part.fetch->cache->id);
  if (target == part.peer->targets.end()) return;
  target->second.problem =
      "what was written straight into the GPU's memory " +
      std::string(status.code == StatusCode::kCorrupt ? "was damaged, until it is connected anew: "
                                                      : "could not be settled: ") +
      status.message;
}

// A chunk that will not be unpacked any more: its fetch ended while it waited for the caller's GPU.
bool drop_chunk(AgentCore& core, const std::shared_ptr<Part>& part, const wire::Commit& commit) {
  Guard guard(core);
  if (!part->fetch->ending) return false;
  --part->fetch->unpacking;
  return_slot(core, part, commit.slot);
  complete(core, part->fetch);
  grant_slots(core);
  return true;
}

void unpack_chunk(AgentCore& core, const std::shared_ptr<Part>& part, const wire::Commit& commit) {
  const auto fetch = part->fetch;
  if (fetch->cache->gpu && drop_chunk(core, part, commit)) return;
  UnpackedChunk chunk;
  const TimePoint began = Clock::now();
  Status status = unpack_commit(core, *part, commit, chunk);
  core.recorder.add(TraceKind::kVerify, fetch->spec.generation,
                    {.peer = part->peer->id,
                     .chunk = commit.chunk,
                     .bytes = commit.bytes,
                     .began = began,
                     .code = status.code});
  Guard guard(core);
  --fetch->unpacking;
  return_slot(core, part, commit.slot);
  if (status.code == StatusCode::kCorrupt) {
    ++core.counters.digest_errors;
    if (part->gpu) distrust_gpu_slots(*part);
  }
  const bool suspect = core.options.digest ? status.code == StatusCode::kCorrupt : !status.ok();
  if (suspect && part->direct && fetch->cache->gpu) {
    distrust_direct(*part, status);
  }
  if (fetch->ending) {
    complete(core, fetch);
  } else if (status.code == StatusCode::kProtocol) {
    drop_peer(core, part->peer, std::move(status));
  } else if (!status.ok()) {
    fail_fetch(core, fetch, std::move(status));
  } else {
    count_chunk(core, *part, commit, chunk);
    if (--part->chunks_left == 0) complete_part(core, part);
  }
  grant_slots(core);
}

// What has landed by a link. Returns the part whose chunk is to be unpacked now, by the caller:
// null where that is for later, or for nobody. What a peer says that writes without asking was not
// looked at before.
std::shared_ptr<Part> take_landed(AgentCore& core, Peer& peer, const wire::Commit& commit) {
  const bool asked = !peer.link->one_sided();  // on_incoming() has found the slot granted
  const auto give_up = [&] {
    if (asked && core.slots[commit.slot].state == SlotInfo::kReceiving) {
      free_slot(core, commit.slot);
    }
  };
  const auto found = peer.parts.find(commit.fetch_id);
  // Cancelled while the bytes were on their way: a slot that nobody was asked for is in quarantine.
  if (found == peer.parts.end() || peer.state != Peer::kReady) {
    give_up();
    return nullptr;
  }
  const auto part = found->second;
  if (!asked) {
    const bool repeated = part->accepted
                              ? commit.chunk < part->arrived.size() && part->arrived[commit.chunk]
                              : std::any_of(
                                    part->early.begin(), part->early.end(),
                                    [&](const auto& other) { return other.chunk == commit.chunk; });
    if (repeated) return nullptr;
    if (!granted_for(core, *part, commit)) {
      throw Error(StatusCode::kProtocol, "COMMIT of chunk " + std::to_string(commit.chunk) +
                                             " into slot " + std::to_string(commit.slot) +
                                             ", which was not granted for it");
    }
  }
  if (!part->accepted) {  // data streams may overtake the control stream, which brings the ACCEPT
    part->early.push_back(commit);
    core.slots[commit.slot].state = SlotInfo::kLanded;
    return nullptr;
  }
  try {
    claim_chunk(core, *part, commit);
  } catch (const Error&) {
    give_up();
    throw;
  }
  return part;
}

}  // namespace

void take_chunk(AgentCore& core, const std::shared_ptr<Part>& part, const wire::Commit& commit) {
  claim_chunk(core, *part, commit);
  run_unpack(core, part->fetch, commit.bytes,
             [&core, part, commit] { unpack_chunk(core, part, commit); });
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
  take_chunk(core, part, commit);
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
  wire::Commit commit;
  std::shared_ptr<Part> part;
  {
    Guard guard(*core);
    try {
      if (wire::type_of(notice) != wire::MessageType::kCommit) {
        throw Error(StatusCode::kProtocol, "a write came without a COMMIT");
      }
      commit = wire::Commit::decode(notice.subspan(1));
      part = take_landed(*core, *this, commit);
    } catch (const Error& error) {
      drop_peer(*core, shared_from_this(), {error.code(), "'" + name + "': " + error.what()});
    } catch (const std::exception& error) {  // std::bad_alloc
      drop_peer(*core, shared_from_this(),
                {StatusCode::kNoResources, "'" + name + "': handling its write: " + error.what()});
    }
    if (part && part->fetch->cache->gpu) {
      run_unpack(*core, part->fetch, commit.bytes,
                 [core = core, part, commit] { unpack_chunk(*core, part, commit); });
      part = nullptr;
    }
    if (!part) {
      if (core->arena) grant_slots(*core);
      return;
    }
  }
  // Here, on the receiving thread: the bytes are in this core's cache.
  unpack_chunk(*core, part, commit);
}

}  // namespace kvxfer
