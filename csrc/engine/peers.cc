#include <utility>

#include "base/event_loop.h"
#include "engine/codecs.h"
#include "engine/core.h"
#include "layout/scale_checks.h"

namespace kvxfer {
namespace {

void renew_lease(AgentCore& core, const std::string& offer_id, const Generation& generation) {
  const auto offer = core.offers.find(generation);
  if (offer != core.offers.end() && offer->second->id == offer_id) renew_lease(*offer->second);
}

bool allows_direct(const AgentCore& core, const Peer& peer) {
  return core.options.path != Path::kStaged && peer.link->direct();
}

void greet(AgentCore& core, Peer& peer, const wire::Hello& hello) {
  if (peer.state != Peer::kGreeting) throw Error(StatusCode::kProtocol, "HELLO came twice");
  if (hello.name != peer.name || hello.incarnation != peer.incarnation) {
    throw Error(StatusCode::kProtocol, "the handshake was with '" + peer.name + "', but '" +
                                           hello.name +
                                           "' or another incarnation of it said HELLO");
  }
  if (hello.slot_bytes == 0) throw Error(StatusCode::kProtocol, "HELLO with no staging");
  peer.slot_bytes = hello.slot_bytes;
  peer.schemes = hello.schemes & ~(wire::kDirectBit | wire::kGpuIpcBit | wire::kGpuCachesBit);
  peer.direct = (hello.schemes & wire::kDirectBit) != 0 && allows_direct(core, peer);
  peer.gpu_ipc = (hello.schemes & wire::kGpuIpcBit) != 0 && allows_gpu_ipc(core, peer);
  if (!peer.inbound) peer.has_gpus = (hello.schemes & wire::kGpuCachesBit) != 0;
  peer.state = Peer::kReady;
  tell_of_gpus(core, peer);
  for (const auto& part : std::exchange(peer.pending, {})) {
    if (!part->fetch->ending) start_part(core, part);
  }
  if (core.arena) grant_slots(core);
}

// Times any count of 32 bits it does not overflow.
constexpr int64_t kMaxStride = int64_t{1} << 31;

// Layouts of a peer are compared with ours, never dereferenced: addresses are relative.
CacheLayout to_layout(const wire::Layout& message) {
  if (message.element > static_cast<uint8_t>(ElementType::kFloat8E5M2FNUZ) ||
      message.block_size == 0 || message.num_heads == 0 || message.layers.empty() ||
      message.planes.empty()) {
    throw Error(StatusCode::kProtocol, "LAYOUT describes no cache");
  }
  CacheLayout layout;
  layout.model = message.model;
  layout.element = static_cast<ElementType>(message.element);
  layout.num_blocks = message.num_blocks;
  layout.block_size = message.block_size;
  layout.num_heads = message.num_heads;
  layout.first_head = message.first_head;
  layout.layers = message.layers;
  for (const auto& plane : message.planes) layout.planes.push_back({plane.name, plane.content});
  for (const auto& view : message.views) {
    for (int64_t stride :
         {view.block_stride, view.head_stride, view.token_stride, view.content_stride}) {
      if (stride < 0 || stride > kMaxStride) {
        throw Error(StatusCode::kProtocol, "LAYOUT has the stride " + std::to_string(stride));
      }
    }
    layout.views.push_back({reinterpret_cast<std::byte*>(view.offset), view.block_stride,
                            view.head_stride, view.token_stride, view.content_stride});
  }
  check_scales(message.scales, message.views.size(), layout.element);
  layout.scales = message.scales;
  return layout;
}

void dispatch(AgentCore& core, const std::shared_ptr<Peer>& peer,
              std::span<const std::byte> message) {
  using wire::MessageType;
  const MessageType type = wire::type_of(message);
  const auto body = message.subspan(1);
  if (peer->state == Peer::kGreeting && type != MessageType::kHello && type != MessageType::kBye) {
    throw Error(StatusCode::kProtocol, "the first message was not HELLO");
  }
  const bool for_producer = type == MessageType::kLayout || type == MessageType::kFetch ||
                            type == MessageType::kCredit || type == MessageType::kDone ||
                            type == MessageType::kCancel || type == MessageType::kRenew ||
                            type == MessageType::kDecline || type == MessageType::kMemory ||
                            type == MessageType::kFetchDirect || type == MessageType::kGpuArena ||
                            type == MessageType::kFetchGpu || type == MessageType::kGpuTried;
  const bool for_consumer = type == MessageType::kAccept || type == MessageType::kCommit ||
                            type == MessageType::kRefused || type == MessageType::kCancelled ||
                            type == MessageType::kWant || type == MessageType::kDeclined ||
                            type == MessageType::kAcceptDirect || type == MessageType::kAcceptGpu ||
                            type == MessageType::kGpuClosed || type == MessageType::kGpuTrial ||
                            type == MessageType::kGpuCaches;
  if ((for_producer && !peer->inbound) || (for_consumer && peer->inbound)) {
    throw Error(StatusCode::kProtocol, "message type " + std::to_string(static_cast<int>(type)) +
                                           " came from the wrong side of the link");
  }
  switch (type) {
    case MessageType::kHello: return greet(core, *peer, wire::Hello::decode(body));
    case MessageType::kLayout: {
      const auto layout = wire::Layout::decode(body);
      return keep_layout(core, *peer, layout.cache_id, to_layout(layout));
    }
    case MessageType::kFetch:
      return handle_fetch(core, peer, wire::FetchDirect{wire::Fetch::decode(body), 0, {}});
    case MessageType::kAccept:
      return handle_accept(core, *peer, wire::Accept::decode(body), nullptr);
    case MessageType::kMemory: return keep_keys(core, *peer, wire::Memory::decode(body));
    case MessageType::kFetchDirect: {
      if (!peer->direct) throw Error(StatusCode::kProtocol, "FETCH_DIRECT was not agreed on");
      return handle_fetch(core, peer, wire::FetchDirect::decode(body));
    }
    case MessageType::kAcceptDirect: {
      const auto answer = wire::AcceptDirect::decode(body);
      return handle_accept(core, *peer, answer.accept, &answer);
    }
    case MessageType::kGpuArena: return keep_gpu_arena(*peer, wire::GpuArena::decode(body));
    case MessageType::kFetchGpu: {
      auto asked = wire::FetchGpu::decode(body);
      if (!peer->arenas.contains(asked.arena)) {
        throw Error(StatusCode::kProtocol, "FETCH_GPU without GPU_ARENA");
      }
      return handle_fetch(core, peer, {std::move(asked.fetch), 0, {}}, asked.arena);
    }
    case MessageType::kAcceptGpu: {
      const auto answer = wire::AcceptGpu::decode(body);
      return handle_accept(core, *peer, answer.accept, nullptr, &answer);
    }
    case MessageType::kGpuTrial: return handle_gpu_trial(core, peer, wire::GpuTrial::decode(body));
    case MessageType::kGpuTried: return handle_gpu_tried(core, *peer, wire::GpuTried::decode(body));
    case MessageType::kGpuCaches:
      wire::decode_gpu_caches(body);
      if (!peer->gpu_ipc) throw Error(StatusCode::kProtocol, "GPU_CACHES was not agreed on");
      peer->has_gpus = true;
      return;
    case MessageType::kGpuClosed:  // links that share memory of GPUs keep it for themselves
      throw Error(StatusCode::kProtocol, "GPU_CLOSED was not agreed on");
    case MessageType::kCommit: return handle_commit(core, *peer, wire::Commit::decode(body));
    case MessageType::kRefused: return handle_refused(core, *peer, wire::Refused::decode(body));
    case MessageType::kCredit: return handle_credit(core, *peer, wire::Credit::decode(body));
    case MessageType::kWant: return handle_want(core, *peer, wire::Want::decode(body));
    case MessageType::kDone: return handle_done(core, *peer, wire::decode_fetch_id(body));
    case MessageType::kCancel: return handle_cancel(core, *peer, wire::decode_fetch_id(body));
    case MessageType::kDecline: return handle_decline(core, peer, wire::Decline::decode(body));
    case MessageType::kDeclined: return handle_declined(core, *peer, wire::decode_fetch_id(body));
    case MessageType::kCancelled: return free_quarantined(core, *peer, wire::decode_fetch_id(body));
    case MessageType::kPing:
      wire::decode_ping(body);
      for (const auto& [id, serve] : peer->serves) {
        if (serve->offer) {
          renew_lease(*serve->offer);
        } else {  // not begun: something is measured or registered first
          renew_lease(core, serve->request.offer_id, serve->request.generation);
        }
      }
      return;
    case MessageType::kRenew: {
      const auto renew = wire::Renew::decode(body);
      return renew_lease(core, renew.offer_id, renew.generation);
    }
    case MessageType::kBye:
      return drop_peer(
          core, peer,
          {StatusCode::kPeerLost, "'" + peer->name + "' said goodbye: " + wire::decode_bye(body)});
  }
}

}  // namespace

void Peer::on_message(Link&, std::span<const std::byte> message) {
  Guard guard(*core);
  last_heard = Clock::now();
  if (state == kClosing) return;  // its slots are freed at on_closed()
  const auto self = shared_from_this();
  try {
    dispatch(*core, self, message);
  } catch (const Error& error) {
    // Values that make no sense here are the peer's, not our caller's.
    const bool invalid = error.code() == StatusCode::kInvalid;
    drop_peer(*core, self,
              {invalid ? StatusCode::kProtocol : error.code(), "'" + name + "': " + error.what()});
  } catch (const std::exception& error) {  // std::bad_alloc: what a peer sends must not end us
    drop_peer(*core, self,
              {StatusCode::kNoResources, "'" + name + "': handling its message: " + error.what()});
  }
}

void Peer::on_lost(Link&, const std::string& reason) {
  Guard guard(*core);
  drop_peer(*core, shared_from_this(), {StatusCode::kPeerLost, "lost '" + name + "': " + reason});
}

void Peer::on_closed(Link&, const std::string& reason) {
  Guard guard(*core);
  const auto self = shared_from_this();
  drop_peer(*core, self, {StatusCode::kPeerLost, "lost '" + name + "': " + reason});
  take_registered(*this, std::nullopt);  // its queue pairs are gone, and nobody reaches it
  exposed.clear();
  free_slots_of(*core, id);
  while (!layouts.empty()) forget_layout(*core, *this, layouts.begin()->first);
  core->peers.erase(id);
  core->peers_changed.notify_all();
}

void drop_peer(AgentCore& core, const std::shared_ptr<Peer>& peer, Status why) {
  if (peer->state == Peer::kClosing) return;
  // It hears why, unless it is the one that has gone.
  if (peer->link && why.code != StatusCode::kPeerLost) {
    peer->link->send(wire::encode_bye(why.message));
  }
  peer->state = Peer::kClosing;
  peer->failure = std::move(why);
  const auto serves = peer->serves;
  for (const auto& [id, serve] : serves) end_serve(core, serve, std::nullopt);
  const auto parts = peer->parts;
  for (const auto& [id, part] : parts) fail_part(core, part, peer->failure);
  for (const auto& part : std::exchange(peer->pending, {})) fail_part(core, part, peer->failure);
  if (peer->link) peer->link->close(peer->failure.message);
}

void run_or_drop(AgentCore& core, const std::shared_ptr<Peer>& peer,
                 const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    drop_peer(core, peer, {error.code(), error.what()});
  } catch (const std::exception&) {  // std::bad_alloc, so nothing long is said
    drop_peer(core, peer, {StatusCode::kNoResources, "out of memory"});
  }
}

void send_renew(const Part& part) {
  const FetchSpec& spec = part.fetch->spec;
  part.peer->link->send(wire::Renew{spec.offer_id, spec.generation}.encode());
}

void beat(AgentCore& core) {
  const TimePoint now = Clock::now();
  const Duration timeout = to_duration(core.options.heartbeat_timeout);
  const Duration interval = to_duration(core.options.heartbeat_interval);
  // After this process itself was stopped, what peers said meanwhile waits unread: start afresh.
  const bool was_stopped = now - core.last_beat > timeout;
  core.last_beat = now;
  const auto peers = core.peers;
  for (const auto& [id, peer] : peers) {
    if (peer->state != Peer::kReady && peer->state != Peer::kGreeting) continue;
    if (peer->retired && peer->parts.empty() && peer->pending.empty()) {
      drop_peer(core, peer, {StatusCode::kClosed, "another connection has taken its place"});
      continue;
    }
    if (was_stopped) peer->last_heard = now;
    const auto silence = std::chrono::duration<double>(now - peer->last_heard.load());
    if (silence > timeout) {
      drop_peer(core, peer,
                {StatusCode::kPeerLost,
                 "lost '" + peer->name + "': not a word for " + std::to_string(silence.count()) +
                     " s; its host, its process or the network has stopped"});
      continue;
    }
    peer->link->send(wire::encode_ping());
    if (peer->state != Peer::kReady) continue;
    // Not asked for yet: something is measured or registered first.
    for (const auto& part : peer->pending) send_renew(*part);
  }
  set_timer(core, core.heartbeat, now + interval, [&core] { beat(core); });
}

PeerId Agent::add_peer(const std::string& name) {
  AgentCore& core = *core_;
  core.check_fork();
  Guard guard(core);
  core.check_open();
  auto peer = std::make_shared<Peer>();
  peer->core = &core;
  peer->id = core.next_peer++;
  peer->name = name;
  core.peers[peer->id] = peer;
  return peer->id;
}

void Agent::attach(PeerId id, std::shared_ptr<Link> link, uint64_t incarnation, bool inbound,
                   const std::string& why) {
  AgentCore& core = *core_;
  core.check_fork();
  Guard guard(core);
  core.check_open();
  const auto found = core.peers.find(id);
  if (found == core.peers.end() || found->second->state != Peer::kConnecting) {
    throw Error(StatusCode::kInvalid, "peer " + std::to_string(id) + " is not waiting for a link");
  }
  const auto& peer = found->second;
  if (inbound && link->mapped_arena().empty()) ensure_staging(core);
  peer->link = std::move(link);
  peer->incarnation = incarnation;
  peer->inbound = inbound;
  peer->why = why;
  peer->state = Peer::kGreeting;
  peer->last_heard = Clock::now();
  try {
    peer->link->start(*peer);
  } catch (...) {
    // No on_closed() will come.
    peer->link.reset();
    peer->state = Peer::kConnecting;
    throw;
  }
  uint32_t schemes = kSchemesHere;
  if (allows_direct(core, *peer)) schemes |= wire::kDirectBit;
  if (allows_gpu_ipc(core, *peer)) {
    schemes |= wire::kGpuIpcBit;
    peer->has_gpus = inbound && has_gpu_caches(core);
    if (peer->has_gpus) schemes |= wire::kGpuCachesBit;
  }
  peer->link->send(wire::Hello{wire::kProtocolVersion, core.options.incarnation, core.options.name,
                               core.options.slot_bytes, schemes}
                       .encode());
  if (!core.heartbeat) {
    core.last_beat = Clock::now();
    beat(core);
  }
}

void Agent::fail_peer(PeerId id, const Status& status) {
  AgentCore& core = *core_;
  core.check_fork();
  if (status.ok()) throw Error(StatusCode::kInvalid, "a peer cannot fail with the status OK");
  Guard guard(core);
  const auto found = core.peers.find(id);
  if (found == core.peers.end()) return;
  const auto peer = found->second;
  drop_peer(core, peer, status);
  if (!peer->link) core.peers.erase(id);  // with a link, on_closed() does it
}

bool Agent::peer_alive(PeerId id) const {
  core_->check_fork();
  Guard guard(*core_);
  const auto found = core_->peers.find(id);
  return found != core_->peers.end() && found->second->state != Peer::kClosing;
}

void Agent::retire_peer(PeerId id) {
  core_->check_fork();
  Guard guard(*core_);
  const auto found = core_->peers.find(id);
  if (found != core_->peers.end()) found->second->retired = true;
}

void Agent::renew(PeerId id, const std::string& offer_id, const Generation& generation) {
  core_->check_fork();
  if (offer_id.size() > wire::kMaxName)
    throw Error(StatusCode::kInvalid, "the offer's id is too long");
  Guard guard(*core_);
  const auto found = core_->peers.find(id);
  if (found == core_->peers.end() || found->second->state != Peer::kReady) return;
  found->second->link->send(wire::Renew{offer_id, generation}.encode());
}

}  // namespace kvxfer
