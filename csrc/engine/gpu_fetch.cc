// The consumer's side of memory of GPUs that processes of one host share: slots in a GPU's memory,
// which a producer's GPU writes into.

#include <algorithm>
#include <array>
#include <exception>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "engine/core.h"

namespace kvxfer {
namespace {

// What went wrong, for people, wherever memory is short.
std::string said(const char* what, const std::exception& error) noexcept {
  try {
    return what + std::string(error.what());
  } catch (const std::exception&) {
    return "out of memory";
  }
}

// Without the mutex: takes the device's time.
Exposed prepare(const AgentCore& core, const std::shared_ptr<GpuDevice>& device) noexcept {
  Exposed made;
  try {
    made.arena = device->arena(core.options, made.about);
  } catch (const std::exception& error) {
    made.arena = nullptr;
    made.problem = said("no memory of the GPU can be shared: ", error);
  }
  return made;
}

// Runs on a thread of the device's, without the mutex.
void start_waiting(AgentCore& core, const std::shared_ptr<Peer>& peer,
                   const std::shared_ptr<GpuDevice>& device) {
  {
    const Guard guard(core);
    if (peer->state == Peer::kClosing) return;
  }
  Exposed made = prepare(core, device);
  Guard guard(core);
  const auto entry = peer->exposed.find(device.get());
  if (entry == peer->exposed.end()) return;  // the peer was lost meanwhile, and they with it
  made.device = device;
  made.about.arena = entry->second.about.arena;
  entry->second = std::move(made);
  run_or_drop(core, peer, [&] {
    std::vector<std::shared_ptr<Part>> waiting;
    for (const auto& part : peer->pending) {
      if (part->fetch->cache && part->fetch->cache->gpu == device) waiting.push_back(part);
    }
    for (const auto& part : waiting) {
      std::erase(peer->pending, part);
      if (!part->fetch->ending) start_part(core, part);
    }
    grant_slots(core);
  });
}

// The same.
void look_at_trial(AgentCore& core, const std::shared_ptr<Peer>& peer,
                   const std::shared_ptr<GpuDevice>& device, const std::byte* mailbox,
                   const wire::GpuArena& about, uint32_t trial) {
  std::string problem;
  try {
    std::array<std::byte, wire::kGpuTrialBytes> found{};
    device->packer->read(found.data(), mailbox + gpu_trial_offset(trial), found.size());
    if (found != gpu_trial(about.stamp)) {
      problem = "what the producer's GPU has written into this one's memory is not there";
    }
  } catch (const std::exception& error) {
    problem = said("it can't be seen what the producer's GPU has written: ", error);
  }
  Guard guard(core);
  if (peer->state != Peer::kReady) return;
  run_or_drop(core, peer,
              [&] { peer->link->send(wire::GpuTried{about.arena, trial, problem}.encode()); });
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
  } else if (part.path_why.empty() && !peer.has_gpus) {
    part.path_why = "'" + peer.name + "' has no cache on a GPU";
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
  entry->second.about.arena = static_cast<uint32_t>(peer->exposed.size());
  Status failure{StatusCode::kNoResources, "out of memory"};
  try {
    if (device->pool->submit([&core, peer, device] { start_waiting(core, peer, device); })) return;
    failure = {StatusCode::kClosed, "agent '" + core.options.name + "' is closing"};
  } catch (const std::bad_alloc&) {
  }
  peer->exposed.erase(entry);
  fail_fetch(core, part->fetch, std::move(failure));
}

void handle_gpu_trial(AgentCore& core, const std::shared_ptr<Peer>& peer, wire::GpuTrial trial) {
  const auto found =
      std::find_if(peer->exposed.begin(), peer->exposed.end(), [&](const auto& entry) {
        return entry.second.told && entry.second.about.arena == trial.arena;
      });
  if (found == peer->exposed.end() || trial.trial >= wire::kGpuTrials ||
      (found->second.tried & 1u << trial.trial) != 0) {
    throw Error(StatusCode::kProtocol, "GPU_TRIAL is of no arena, or came twice");
  }
  Exposed& exposed = found->second;
  exposed.tried |= 1u << trial.trial;
  // False: the agent is closing.
  exposed.device->pool->submit([&core, peer, device = exposed.device, arena = exposed.arena,
                                about = exposed.about, number = trial.trial] {
    look_at_trial(core, peer, device, arena->mailbox(about), about, number);
  });
}

void abandon_exposed(Peer& peer) {
  for (const auto& [device, exposed] : peer.exposed) {
    if (exposed.arena && exposed.told) exposed.arena->abandon();
  }
}

}  // namespace kvxfer
