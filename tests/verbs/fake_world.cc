#include "fake_world.h"

#include <arpa/inet.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace fake_verbs::detail {
namespace {

void signal(int fd) {
  const uint64_t one = 1;
  static_cast<void>(!::write(fd, &one, sizeof(one)));
}

bool addressed(const Qp& qp, const fake_verbs::Port& port) {
  if (!qp.attr.ah_attr.is_global) return port.infiniband && qp.attr.ah_attr.dlid == port.lid;
  return std::any_of(port.gids.begin(), port.gids.end(), [&](const fake_verbs::Gid& gid) {
    uint8_t raw[16];
    return ::inet_pton(AF_INET6, gid.text.c_str(), raw) == 1 &&
           std::memcmp(raw, qp.attr.ah_attr.grh.dgid.raw, sizeof(raw)) == 0;
  });
}

}  // namespace

int* events_out(const ibv::AsyncEvent& event) {
  if (event.event_type == ibv::kQpFatal) return &static_cast<Qp*>(event.element.qp)->events_out;
  if (event.event_type == ibv::kCqError) return &static_cast<Cq*>(event.element.cq)->events_out;
  return nullptr;
}

World::World() {
  set_devices(fake_verbs::default_devices());
  worker_ = std::thread([this] { run(); });
}

World::~World() {
  {
    const std::lock_guard lock(mutex);
    stopping_ = true;
  }
  changed.notify_all();
  worker_.join();
}

void World::set_devices(const std::vector<fake_verbs::Device>& given) {
  devices.assign(given.begin(), given.end());
  handles.clear();
  for (fake_verbs::Device& device : devices) handles.push_back({&device});
}

void World::forget_faults() {
  faults.clear();
  mute.clear();
  held.clear();
  hold_completions = hold_sends = hold_registrations = lose_gpu_writes = false;
  delay_gpu_writes = false;
  offset_mask = UINT64_MAX;
  land([](const DelayedWrite&) { return true; });
  flips = 0;
  peer_memory = nullptr;
  retry = std::chrono::milliseconds(50);
}

int World::injected(const char* function) {
  const auto fault = faults.find(function);
  if (fault == faults.end() || fault->second.times == 0) return 0;
  if (fault->second.skip > 0) {
    --fault->second.skip;
    return 0;
  }
  --fault->second.times;
  return fault->second.error;
}

void World::push(ibv::Cq* raw, Completion completion) {
  auto& cq = static_cast<Cq&>(*raw);
  if (cq.overrun) return;
  if (cq.queue.size() == static_cast<size_t>(cq.cqe)) {
    ++counts.overruns;
    return;
  }
  cq.queue.push_back(completion);
  if (!std::exchange(cq.armed, false)) return;
  auto& channel = static_cast<Channel&>(*cq.channel);
  channel.events.push_back(&cq);
  signal(channel.fd);
}

void World::complete_send(Qp& qp, const ibv::SendWr& wr, ibv::WcStatus status) {
  ++qp.unsignalled;
  if (status == ibv::kSuccess && !(wr.send_flags & ibv::kSignaled)) return;
  Completion completion;
  completion.wc = {};
  completion.wc.wr_id = wr.wr_id;
  completion.wc.status = status;
  completion.wc.opcode = wr.opcode == ibv::kSend ? ibv::kWcSend : ibv::kWcRdmaWrite;
  completion.wc.qp_num = qp.qp_num;
  completion.qp = &qp;
  completion.retires = std::exchange(qp.unsignalled, 0);
  if (hold_completions) {
    held.emplace_back(qp.send_cq, completion);
  } else {
    push(qp.send_cq, completion);
  }
}

void World::complete_receive(Qp& qp, uint64_t wr_id, ibv::WcStatus status, uint32_t bytes) {
  Completion completion;
  completion.wc = {};
  completion.wc.wr_id = wr_id;
  completion.wc.status = status;
  completion.wc.opcode = ibv::kWcReceive;
  completion.wc.byte_len = bytes;
  completion.wc.qp_num = qp.qp_num;
  completion.qp = &qp;
  push(qp.recv_cq, completion);
}

void World::to_error(Qp& qp, ibv::WcStatus first) {
  qp.state = ibv::kError;
  for (auto* queue : {&qp.unacknowledged, &qp.sends}) {
    for (const Request& request : *queue) {
      complete_send(qp, request.wr, std::exchange(first, ibv::kFlushed));
    }
    queue->clear();
  }
  for (const auto& [id, where] : qp.receives) complete_receive(qp, id, ibv::kFlushed, 0);
  qp.receives.clear();
  qp.fails_at.reset();
}

void World::add_event(Context& context, ibv::AsyncEvent event) {
  context.events.push_back(event);
  signal(context.async_fd);
}

void World::land(const std::function<bool(const DelayedWrite&)>& which) {
  std::erase_if(delayed, [&](const DelayedWrite& write) {
    if (!which(write)) return false;
    std::memcpy(write.to, write.bytes.data(), write.bytes.size());
    return true;
  });
}

Qp* World::peer_of(const Qp& qp) {
  const auto found = qps.find(qp.attr.dest_qp_num);
  if (found == qps.end() || !port_of(qp).active) return nullptr;
  Qp& peer = *found->second;
  if (peer.state != ibv::kReadyToReceive && peer.state != ibv::kReadyToSend) return nullptr;
  fake_verbs::Port& port = port_of(peer);
  if (!port.active) return nullptr;
  if (peer.attr.dest_qp_num != qp.qp_num || peer.attr.rq_psn != qp.attr.sq_psn) {
    violation("the two ends of a connection do not agree");
    return nullptr;
  }
  if (!addressed(qp, port)) {
    violation("a queue pair is connected to an address that its peer does not have");
    return nullptr;
  }
  return &peer;
}

Mr* World::find_mr(uint32_t key, bool remote, const ibv::Pd* pd, uint64_t address,
                   uint64_t length) {
  for (Mr* mr : mrs) {
    if ((remote ? mr->rkey : mr->lkey) != key) continue;
    if (remote && mr->revoked) return nullptr;
    if (mr->pd != pd)
      violation("a key of another protection domain");
    else if (address < mr->iova || address + length > mr->iova + mr->length)
      violation("an access beyond the registered memory");
    else if (remote && !(mr->access & ibv::kRemoteWrite))
      violation("a write into memory that is not registered for it");
    else
      return mr;
    return nullptr;
  }
  violation("a key that does not exist");
  return nullptr;
}

std::optional<Bytes> World::gather(Qp& qp, const Request& request) {
  if (request.wr.send_flags & ibv::kInline) return request.inlined;
  Bytes all;
  for (const ibv::Sge& where : request.where) {
    const Mr* mr = find_mr(where.lkey, false, qp.pd, where.addr, where.length);
    if (!mr) return std::nullopt;
    // A read pushes the adapter's writes ahead of it.
    if (mr->mapped) land([&](const DelayedWrite& write) { return write.by == qp.facts; });
    const auto* from = static_cast<const std::byte*>(mr->addr) + (where.addr - mr->iova);
    all.insert(all.end(), from, from + where.length);
  }
  return all;
}

bool World::step(Qp& qp, Clock::time_point now) {
  if (!qp.unacknowledged.empty() && now >= *qp.fails_at) {
    to_error(qp, ibv::kRetryExceeded);
    return true;
  }
  if (qp.sends.empty() || hold_sends) return false;
  Qp* peer = peer_of(qp);
  Request& request = qp.sends.front();
  const bool no_receive = peer && request.wr.opcode == ibv::kSend && peer->receives.empty();
  if (!peer || no_receive) {
    if (no_receive && qp.attr.rnr_retry == 7) return false;
    if (!qp.fails_at) qp.fails_at = now + retry;
    if (now < *qp.fails_at) return false;
    to_error(qp, no_receive ? ibv::kRnrRetryExceeded : ibv::kRetryExceeded);
    return true;
  }
  auto data = gather(qp, request);
  if (!data) {
    to_error(qp, ibv::kLocalProtectionError);
    return true;
  }
  if (data->size() > port_of(qp).max_message) {
    violation("a message that is too long for the port");
    to_error(qp, ibv::kLocalLengthError);
    return true;
  }
  if (request.wr.opcode == ibv::kRdmaWrite) {
    if (!data->empty()) {
      Mr* mr = find_mr(request.wr.rkey, true, peer->pd, request.wr.remote_addr, data->size());
      if (!mr || !(peer->attr.qp_access_flags & ibv::kRemoteWrite)) {
        to_error(qp, ibv::kRemoteAccessError);
        return true;
      }
      if (flips > 0) {
        --flips;
        data->back() ^= std::byte{0x10};
      }
      auto* to = static_cast<std::byte*>(mr->addr) + (request.wr.remote_addr - mr->iova);
      if (delay_gpu_writes && mr->mapped) {
        delayed.push_back({mr, peer->facts, to, *data});
      } else {
        std::memcpy(to, data->data(), data->size());
      }
    }
  } else {
    const auto [id, where] = peer->receives.front();
    const Mr* mr = find_mr(where.lkey, false, peer->pd, where.addr, data->size());
    if (!mr || data->size() > where.length) {
      violation("a message that is too long for the receive");
      to_error(qp, ibv::kRemoteInvalidRequest);
      return true;
    }
    peer->receives.pop_front();
    std::memcpy(static_cast<std::byte*>(mr->addr) + (where.addr - mr->iova), data->data(),
                data->size());
    complete_receive(*peer, id, ibv::kSuccess, static_cast<uint32_t>(data->size()));
  }
  bytes[{qp.facts->name, qp.attr.port_num}] += data->size();
  Request finished = std::move(request);
  qp.sends.pop_front();
  if (mute.contains(qp.facts->name)) {
    if (qp.unacknowledged.empty()) qp.fails_at = now + retry;
    qp.unacknowledged.push_back(std::move(finished));
  } else {
    qp.fails_at.reset();
    complete_send(qp, finished.wr, ibv::kSuccess);
  }
  return true;
}

void World::run() {
  std::unique_lock lock(mutex);
  while (!stopping_) {
    bool moved = false;
    Clock::time_point next = Clock::now() + std::chrono::hours(1);
    const Clock::time_point now = Clock::now();
    for (const auto& [number, qp] : qps) {
      if (qp->state != ibv::kReadyToSend) continue;
      moved |= step(*qp, now);
      if (qp->fails_at) next = std::min(next, *qp->fails_at);
    }
    if (moved) {
      // Others get a turn, so that they meet the work half done.
      lock.unlock();
      std::this_thread::yield();
      lock.lock();
      continue;
    }
    changed.wait_until(lock, next);
  }
}

World& world() {
  static World instance;
  return instance;
}

}  // namespace fake_verbs::detail
