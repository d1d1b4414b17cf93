#include <algorithm>
#include <set>
#include <utility>

#include "engine/codec_choice.h"
#include "engine/codecs.h"
#include "engine/core.h"

namespace kvxfer {
namespace {

constexpr uint32_t kMinChunk = 128u << 10;  // smaller ones cost more in messages than they win

// What a chunk must hold: a panel as large as asked for, or a row where that is all the same.
uint64_t least_chunk(const Part& part) {
  const FetchSpec& spec = part.fetch->spec;
  const CodecSpec& codec = spec.codec;
  const std::vector<PlaneSpec>& planes = part.fetch->cache->layout.planes;
  const uint32_t tokens =
      codec.codec == Codec::kRaw ? 1 : std::min(codec.panel_tokens, spec.num_tokens);
  // The producer may hold any type: this is the widest.
  return most_panel_chunk(encodings_of(codec.codec, planes, codec.group, codec.scale), planes,
                          ElementType::kFloat32, tokens);
}

// Smaller chunks for small fetches, so that packing and unpacking overlap there too.
uint32_t pick_chunk_bytes(const AgentCore& core, const Part& part) {
  const bool coded = part.fetch->spec.codec.codec != Codec::kRaw;
  const uint64_t slot = std::min(core.options.slot_bytes, part.peer->slot_bytes);
  uint64_t most = slot;
  if (!part.peer->link->one_sided()) {
    // A slot must hold a coded chunk even if it all travels raw; mostly a third of it is used.
    const uint64_t copied = core.options.copied_chunk_bytes;
    most = std::min<uint64_t>(most, coded ? 2 * copied : copied);
  }
  const uint64_t room = coded ? part.memory_bytes / 2 * 3 : part.memory_bytes;
  const uint64_t share = (room / core.options.window + 4095) / 4096 * 4096;
  const uint64_t chunk = std::min(most, std::max(uint64_t{kMinChunk}, share));
  return static_cast<uint32_t>(std::max(chunk, std::min(slot, least_chunk(part))));
}

// A report on several parts names everything once.
void add_distinct(std::string& list, const std::string& text) {
  if ((", " + list + ", ").find(", " + text + ", ") != std::string::npos) return;
  list += (list.empty() ? "" : ", ") + text;
}

// In what a codec is another than the one asked for, or "".
std::string said_of_codec(const Part& part, const wire::Accept& accept) {
  const FetchSpec& spec = part.fetch->spec;
  const CodecSpec& asked = spec.codec;
  if (static_cast<Codec>(accept.codec) == Codec::kRaw) return "";
  std::string text;
  if (accept.panel_tokens < std::min(asked.panel_tokens, spec.num_tokens)) {
    text += "; panels have " + std::to_string(accept.panel_tokens) + " tokens, not " +
            std::to_string(asked.panel_tokens) + ", for a chunk of " +
            std::to_string(part.chunk_bytes) + " bytes to hold one";
  }
  for (size_t i = 0; i < accept.encodings.size(); ++i) {
    const PlaneSpec& plane = part.fetch->cache->layout.planes[i];
    const uint16_t group = accept.encodings[i].group;
    const Codec codec = static_cast<Codec>(accept.codec);
    if (group == encoding_of(codec, plane, asked.group, asked.scale).group) continue;
    text += "; " + (group == 0 ? "whole rows" : std::to_string(group) + " elements") +
            " of plane '" + plane.name + "' share a scale";
  }
  return text;
}

void report_accept(const Part& part, const wire::Accept& accept) {
  FetchReport& report = part.fetch->report;
  std::string letters;
  for (const uint8_t axis : accept.order) letters += "LPTHN"[axis];
  add_distinct(report.wire_order, letters);
  add_distinct(report.codec, codec_name(static_cast<Codec>(accept.codec)));
  std::string why = part.fetch->nothing_to_code ? "no tokens are outside the tiers" : accept.why;
  why += said_of_codec(part, accept);
  const ElementType mine = part.fetch->cache->layout.element;
  if (part.producer_element != mine) {
    why +=
        std::string("; ") + element_name(part.producer_element) + " becomes " + element_name(mine);
  }
  add_distinct(report.codec_why, why);
}

// And lets a direct one know where it lands.
void report_path(Part& part, std::string why) {
  FetchReport& report = part.fetch->report;
  const auto target = part.peer->targets.find(part.fetch->cache->id);
  if (part.direct && target != part.peer->targets.end()) {
    part.target = target->second.memory;
    if (!target->second.by.empty()) why += "; written into this GPU " + target->second.by;
  }
  add_distinct(report.path, part.direct ? "direct" : part.gpu ? "gpu-ipc" : "staged");
  add_distinct(report.path_why, why);
  if (part.fetch->cache->gpu && !part.direct && !part.gpu) {
    add_distinct(report.why, "GPU memory goes through the host's");
  }
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

// Runs on the pool, without the mutex: measuring takes a while, once.
void measure_and_start(AgentCore& core, const std::shared_ptr<Part>& part) {
  try {
    codec_rates();
  } catch (const std::exception& error) {  // std::bad_alloc: measuring takes tens of megabytes
    Guard guard(core);
    return fail_fetch(core, part->fetch,
                      {StatusCode::kNoResources,
                       std::string("codec auto: coding could not be measured: ") + error.what()});
  }
  Guard guard(core);
  // A peer that is lost has taken it out, and failed it.
  if (std::erase(part->peer->pending, part) == 0 || part->fetch->ending) return;
  start_part(core, part);
  grant_slots(core);
}

bool has_failed(AgentCore& core, const FetchState& fetch) {
  const Guard guard(core);
  return fetch.ending && !fetch.status.ok();
}

void zero_tail(AgentCore& core, const Part& part) {
  Status status;
  try {
    // It may have waited for the caller's GPU until the fetch had failed.
    if (!has_failed(core, *part.fetch)) part.plan->zero_tail(part.fetch->cache->packer());
  } catch (const Error& error) {
    status = {error.code(), std::string("the end of the last block: ") + error.what()};
  } catch (const std::exception& error) {  // std::bad_alloc
    status = {StatusCode::kNoResources, error.what()};
  }
  Guard guard(core);
  const auto fetch = part.fetch;
  --fetch->unpacking;
  if (!status.ok()) {
    // All chunks may be there: then it has ended well so far, but for this.
    if (fetch->ending && fetch->status.ok()) fetch->status = status;
    fail_fetch(core, fetch, std::move(status));
  }
  complete(core, fetch);
}

}  // namespace

void complete_part(AgentCore& core, const std::shared_ptr<Part>& part) {
  const auto fetch = part->fetch;
  part->done = true;
  part->peer->parts.erase(part->id);
  reclaim_granted(core, *part, /*exposed=*/false);  // what the producer did not need
  if (--fetch->parts_left == 0) succeed(core, fetch);
}

// A link over adapters has more to say at the end of a fetch, such as which rails were lost.
static void describe_links_again(FetchState& fetch) {
  std::string links;
  for (const auto& part : fetch.parts) {
    const Link* link = part->peer ? part->peer->link.get() : nullptr;
    if (!link || !link->crosses_wire() || !link->one_sided()) return;
    add_distinct(links, link->describe());
  }
  if (!fetch.report.link.empty()) fetch.report.link = links;
}

// Of a fetch that failed, adapters may have written what nobody has settled: that must not overtake
// what is written into the blocks once they are given back. Whether complete() is called again,
// when that is done.
static bool settle_first(AgentCore& core, const std::shared_ptr<FetchState>& fetch) {
  if (fetch->status.ok() || fetch->settled || !fetch->cache || !fetch->cache->gpu) return false;
  const bool written = std::any_of(fetch->parts.begin(), fetch->parts.end(), [](const auto& part) {
    return part->direct && part->granted > 0;
  });
  if (!written) return false;
  fetch->settled = true;
  ++fetch->unpacking;
  if (fetch->cache->gpu->pool->submit([&core, fetch] {
        settle_failed(*fetch);
        Guard guard(core);
        --fetch->unpacking;
        complete(core, fetch);
      })) {
    return true;
  }
  // close() has stopped that thread.
  if (!fetch->cache->gpu->given_up()) settle_failed(*fetch);
  --fetch->unpacking;
  return false;
}

static void end_fetch(AgentCore& core, const std::shared_ptr<FetchState>& fetch) {
  fetch->done = true;
  fetch->ended = Clock::now();
  if (!fetch->declines) {
    core.recorder.add(fetch->status.ok() ? TraceKind::kPublish : TraceKind::kFail,
                      fetch->spec.generation,
                      {.bytes = fetch->report.bytes,
                       .began = fetch->started,
                       .code = fetch->status.code,
                       .name = fetch->spec.offer_id});
  }
  clear_timer(core, fetch->timer);
  core.fetches.erase(fetch->handle);
  fetch->changed.notify_all();
  signal_event(fetch->event);
  const bool in_background = fetch->declines && fetch->given_up;
  if (!in_background) core.events.push(fetch->handle);
}

void complete(AgentCore& core, const std::shared_ptr<FetchState>& fetch) {
  if (fetch->done || !fetch->ending || fetch->unpacking > 0 || fetch->fenced > 0) return;
  if (settle_first(core, fetch)) return;
  if (!fetch->declines) describe_links_again(*fetch);
  if (fetch->cache) --fetch->cache->users;
  end_fetch(core, fetch);
  for (const auto& part : fetch->parts) part->target.reset();  // jobs that end now hold parts
  fetch->parts.clear();                                        // they point back here
}

void leave_fetch(AgentCore& core, const std::shared_ptr<FetchState>& fetch,
                 const std::string& why) {
  fetch->ending = true;
  fetch->status = {StatusCode::kClosed, "fetch of offer '" + fetch->spec.offer_id + "': " + why +
                                            ", and may still write into the blocks"};
  end_fetch(core, fetch);
}

// Of a fetch that may not be staged.
static Status not_direct(const Part& part, const std::string& why) {
  return {StatusCode::kNoResources, "gpudirect-rdma is required, and what '" + part.peer->name +
                                        "' sends over " + part.peer->link->transport() +
                                        " would be staged in host memory: " + why};
}

void start_part(AgentCore& core, const std::shared_ptr<Part>& part) {
  Peer& peer = *part->peer;
  if (part->fetch->declines) {
    part->id = peer.next_fetch_id++;
    peer.parts[part->id] = part;
    return send_decline(*part);
  }
  const Codec codec = part->fetch->spec.codec.codec;
  if (codec == Codec::kAuto && peer.link->crosses_wire() && !codec_rates_known()) {
    // Meanwhile it fails with the peer, as one does that waits for HELLO.
    peer.pending.push_back(part);
    if (core.pool->submit([&core, part] { measure_and_start(core, part); })) return;
    return fail_fetch(core, part->fetch,
                      {StatusCode::kClosed, "agent '" + core.options.name + "' is closing"});
  }
  // For kAuto the producer knows what this side has, and chooses.
  if (codec != Codec::kAuto && (schemes_of(codec) & ~peer.schemes) != 0) {
    return fail_fetch(
        core, part->fetch,
        {StatusCode::kMismatch, std::string("codec ") + codec_name(codec) + " needs " +
                                    scheme_list(schemes_of(codec)) + ": '" + core.options.name +
                                    "' has " + scheme_list(kSchemesHere) + ", its producer '" +
                                    peer.name + "' has " + scheme_list(peer.schemes) +
                                    ": fetch with a codec that both have, or with auto"});
  }
  part->asks_direct = may_go_direct(core, *part);
  if (part->asks_direct) {
    const auto target = peer.targets.find(part->fetch->cache->id);
    if (target != peer.targets.end() && target->second.ready()) {
      part->asks_direct = target->second.problem.empty();
      part->path_why = target->second.problem;
    } else if (!stages_meanwhile(core, *part)) {
      return register_and_start(core, part);
    }
  }
  if (part->fetch->spec.gpu_direct_only && !part->asks_direct) {
    return fail_fetch(core, part->fetch, not_direct(*part, part->path_why));
  }
  if (may_use_gpu_slots(core, *part)) {
    const auto exposed = peer.exposed.find(part->fetch->cache->gpu.get());
    if (exposed == peer.exposed.end() || !exposed->second.ready()) {
      return expose_and_start(core, part);
    }
    part->asks_gpu = exposed->second.problem.empty();
    part->path_why = exposed->second.problem;
  }
  part->id = peer.next_fetch_id++;
  peer.parts[part->id] = part;
  part->chunk_bytes = pick_chunk_bytes(core, *part);
  FetchReport& report = part->fetch->report;
  add_distinct(report.transport, peer.link->transport());
  add_distinct(report.link, peer.link->describe());
  add_distinct(report.why, peer.why);
  // While there are plenty, slots go along with the question, which saves a round trip. They are
  // not worth waiting for: the offer may not be there for a long time. So no more than half of what
  // a peer may have where there are others: the rest is for offers of it that are there. Where they
  // let the producer write into blocks, they are granted when it has said what it will write.
  const uint64_t chunks = (part->memory_bytes + part->chunk_bytes - 1) / part->chunk_bytes;
  std::vector<uint32_t> slots;
  while (!part->asks_direct && slots.size() < std::min<uint64_t>(chunks, window_of(core, *part)) &&
         core.arena->num_free() > std::max(1u, core.arena->num_slots() / 2) &&
         peer.granted < core.arena->num_slots() / 4) {
    slots.push_back(grant_slot(core, *part));
  }
  send_fetch(core, *part, slots);
}

void handle_accept(AgentCore& core, Peer& peer, const wire::Accept& accept,
                   const wire::AcceptDirect* answer, const wire::AcceptGpu* gpu) {
  const auto found = peer.parts.find(accept.fetch_id);
  if (found == peer.parts.end()) return;
  const auto part = found->second;
  const FetchState& fetch = *part->fetch;
  if (part->accepted || fetch.declines) {
    throw Error(StatusCode::kProtocol, "ACCEPT came twice, or answers a DECLINE");
  }
  const bool direct = answer && answer->direct != 0;
  if (part->asks_direct != (answer != nullptr) || part->asks_gpu != (gpu != nullptr) ||
      (direct && accept.panel_tokens > 0)) {
    throw Error(StatusCode::kProtocol, "ACCEPT is no answer to what was asked");
  }
  if (fetch.spec.gpu_direct_only && !direct) {
    return fail_fetch(core, part->fetch, not_direct(*part, answer->path_why));
  }
  try {
    part->plan.emplace(plan_part(*part, accept));
  } catch (const Error& error) {
    if (error.code() != StatusCode::kMismatch) throw;
    return fail_fetch(core, part->fetch,
                      {StatusCode::kMismatch, "'" + peer.name + "': " + error.what()});
  }
  const uint32_t chunks = part->plan->num_chunks();
  if (accept.num_chunks != chunks || accept.wire_bytes != part->plan->wire_bytes()) {
    fail_fetch(
        core, part->fetch,
        {StatusCode::kMismatch,
         "'" + peer.name + "' means to send " + std::to_string(accept.wire_bytes) + " bytes in " +
             std::to_string(accept.num_chunks) + " chunks, this side expects " +
             std::to_string(part->plan->wire_bytes()) + " in " + std::to_string(chunks)});
    return;
  }
  part->producer_element = static_cast<ElementType>(accept.element);
  part->arrived.assign(chunks, false);
  part->chunks_left = chunks;
  part->wanted = accept.per_layer != 0 ? 0 : chunks;  // else WANT says so, layer by layer
  part->accepted = true;
  part->direct = direct;
  if (gpu && gpu->gpu != 0) part->gpu = peer.exposed.at(fetch.cache->gpu.get()).arena;
  report_accept(*part, accept);
  report_path(*part, answer ? answer->path_why : gpu ? gpu->path_why : part->path_why);
  core.recorder.add(TraceKind::kAccept, fetch.spec.generation,
                    {.peer = peer.id, .bytes = accept.wire_bytes});
  // What is behind the last token is stale memory: an engine that reads whole blocks must not meet
  // an old NaN there.
  const CacheLayout& layout = fetch.cache->layout;
  const uint32_t used = (fetch.spec.table.first_slot + fetch.spec.num_tokens) % layout.block_size;
  if (used > 0) {
    ++part->fetch->unpacking;
    run_unpack(core, part->fetch,
               (layout.block_size - used) * (part->memory_bytes / fetch.spec.num_tokens),
               [&core, part] { zero_tail(core, *part); });
  }
  for (const wire::Commit& commit : std::exchange(part->early, {})) take_chunk(core, part, commit);
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
  part->fetch->report.retry_after = refused.retry_ms / 1e3;
  fail_part(core, part, {refused.code, "'" + peer.name + "' refused: " + refused.reason});
}

void fail_part(AgentCore& core, const std::shared_ptr<Part>& part, Status status) {
  if (part->fetch->declines) return end_declined_part(core, part, std::move(status));
  fail_fetch(core, part->fetch, std::move(status));
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
  open_gate(core, *fetch);
  complete(core, fetch);
  if (fetch->fenced > 0) watch_fence(core, fetch);
  if (core.arena) grant_slots(core);
}

}  // namespace kvxfer
