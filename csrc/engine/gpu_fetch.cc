// The consumer's side of memory of GPUs that processes of one host share: slots in a GPU's memory,
// which a producer's GPU writes into.

#include <algorithm>
#include <utility>

#include "engine/core.h"

namespace kvxfer {
namespace {

// Without the mutex: takes the device's time.
Exposed prepare(const AgentCore& core, GpuDevice& device) {
  Exposed made;
  try {
    made.arena = device.arena(core.options);
  } catch (const std::exception& error) {
    made.problem = std::string("no memory of the GPU can be shared: ") + error.what();
  }
  return made;
}

// Runs on a thread of the device's, without the mutex.
void start_waiting(AgentCore& core, Peer& peer, const std::shared_ptr<GpuDevice>& device) {
  {
    const Guard guard(core);
    if (peer.state == Peer::kClosing) return;
  }
  Exposed made = prepare(core, *device);
  Guard guard(core);
  const auto entry = peer.exposed.find(device.get());
  if (entry == peer.exposed.end()) return;  // the peer was lost meanwhile, and they with it
  made.number = entry->second.number;
  entry->second = std::move(made);
  std::vector<std::shared_ptr<Part>> waiting;
  std::erase_if(peer.pending, [&](const auto& part) {
    if (!part->fetch->cache || part->fetch->cache->gpu != device) return false;
    waiting.push_back(part);
    return true;
  });
  for (const auto& part : waiting) {
    if (!part->fetch->ending) start_part(core, part);
  }
  grant_slots(core);
}

}  // namespace

bool allows_gpu_ipc(const AgentCore& core, const Peer& peer) {
  return core.options.gpu_ipc && peer.link->gpu_ipc_problem().empty();
}

bool may_use_gpu_slots(const AgentCore& core, Part& part) {
  const Peer& peer = *part.peer;
  if (!part.fetch->cache->gpu || peer.link->crosses_wire()) return false;
  part.path_why = peer.link->gpu_ipc_problem();
  if (!core.options.gpu_ipc) {
    part.path_why = "gpu_ipc is off";
  } else if (part.path_why.empty() && !core.options.digest) {
    part.path_why = "digest is off, and nothing else finds what a GPU's writes to another lose";
  } else if (part.path_why.empty() && !peer.gpu_ipc) {
    part.path_why = "'" + peer.name + "' has gpu_ipc off, or is of an older release";
  } else if (part.path_why.empty() && part.fetch->cache->packer()->given_up()) {
    part.path_why = "the GPU was given up";
  }
  return part.path_why.empty();
}

void expose_and_start(AgentCore& core, const std::shared_ptr<Part>& part) {
  const auto& peer = part->peer;
  const auto& device = part->fetch->cache->gpu;
  send_renew(*part);
  // Meanwhile it fails with the peer, as one does that waits for HELLO.
  peer->pending.push_back(part);
  const auto [entry, is_new] = peer->exposed.try_emplace(device.get());
  if (!is_new) return;  // is under way
  entry->second.number = static_cast<uint32_t>(peer->exposed.size());
  if (device->pool->submit([&core, peer, device] { start_waiting(core, *peer, device); })) return;
  peer->exposed.erase(entry);
  fail_fetch(core, part->fetch,
             {StatusCode::kClosed, "agent '" + core.options.name + "' is closing"});
}

void abandon_exposed(Peer& peer) {
  for (const auto& [device, exposed] : peer.exposed) {
    if (exposed.arena && exposed.told) exposed.arena->abandon();
  }
}

}  // namespace kvxfer
