#include "fake_verbs.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "transport/verbs/abi.h"

namespace kvxfer::ibv {
struct Device {
  fake_verbs::Device* facts = nullptr;
};
}  // namespace kvxfer::ibv

namespace {

namespace ibv = kvxfer::ibv;
using Clock = std::chrono::steady_clock;
using Bytes = std::vector<std::byte>;

struct Qp;

struct Context : ibv::Context {
  fake_verbs::Device* facts = nullptr;
  std::deque<ibv::AsyncEvent> events;
};

struct Channel : ibv::CompChannel {
  std::deque<ibv::Cq*> events;
};

struct Completion {
  ibv::Wc wc;
  Qp* qp = nullptr;
  uint32_t retires = 0;  // places in the send queue
};

struct Cq : ibv::Cq {
  std::deque<Completion> queue;
  bool armed = false;
  unsigned unacknowledged = 0;
};

struct Mr : ibv::Mr {
  uint64_t iova = 0;
  unsigned access = 0;
};

struct Request {
  ibv::SendWr wr{};
  std::vector<ibv::Sge> where;
  Bytes inlined;
};

struct Qp : ibv::Qp {
  fake_verbs::Device* facts = nullptr;
  ibv::QpCap cap{};
  ibv::QpAttr attr{};
  uint32_t occupied = 0;  // places in the send queue
  uint32_t unsignalled = 0;
  std::deque<Request> sends;
  std::deque<Request> unacknowledged;  // delivered, but the sender does not know
  std::deque<std::pair<uint64_t, ibv::Sge>> receives;
  std::optional<Clock::time_point> fails_at;
  int events_out = 0;  // read by the user, not acknowledged
};

bool is_about_qp(const ibv::AsyncEvent& event) { return event.event_type == ibv::kQpFatal; }

struct Fault {
  int error = 0, skip = 0, times = 0;
};

// All state, and the thread that carries out work requests.
class World {
 public:
  World() {
    set_devices(fake_verbs::default_devices());
    worker_ = std::thread([this] { run(); });
  }
  ~World() {
    {
      const std::lock_guard lock(mutex);
      stopping_ = true;
    }
    changed.notify_all();
    worker_.join();
  }

  void set_devices(const std::vector<fake_verbs::Device>& given) {
    devices.assign(given.begin(), given.end());
    handles.clear();
    for (fake_verbs::Device& device : devices) handles.push_back({&device});
  }

  void forget_faults() {
    faults.clear();
    mute.clear();
    held.clear();
    hold_completions = hold_sends = false;
    retry = std::chrono::milliseconds(50);
  }

  int injected(const char* function) {
    const auto fault = faults.find(function);
    if (fault == faults.end() || fault->second.times == 0) return 0;
    if (fault->second.skip > 0) {
      --fault->second.skip;
      return 0;
    }
    --fault->second.times;
    return fault->second.error;
  }

  void violation(const std::string& what) {
    ++counts.violations;
    last_violation = what;
  }

  fake_verbs::Port& port_of(const Qp& qp) { return qp.facts->ports.at(qp.attr.port_num - 1u); }

  void push(ibv::Cq* raw, Completion completion) {
    auto& cq = static_cast<Cq&>(*raw);
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

  void complete_send(Qp& qp, const ibv::SendWr& wr, ibv::WcStatus status) {
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

  void complete_receive(Qp& qp, uint64_t wr_id, ibv::WcStatus status, uint32_t bytes) {
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

  void to_error(Qp& qp, ibv::WcStatus first = ibv::kFlushed) {
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

  void add_event(Context& context, ibv::AsyncEvent event) {
    context.events.push_back(event);
    signal(context.async_fd);
  }

  static void signal(int fd) {
    const uint64_t one = 1;
    static_cast<void>(!::write(fd, &one, sizeof(one)));
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<fake_verbs::Device> devices;
  std::deque<ibv::Device> handles;
  std::map<std::string, Fault> faults;
  std::set<Context*> contexts;
  std::set<ibv::Pd*> pds;
  std::set<Mr*> mrs;
  std::set<Channel*> channels;
  std::set<Cq*> cqs;
  std::map<uint32_t, Qp*> qps;
  std::vector<std::pair<ibv::Cq*, Completion>> held;
  bool hold_completions = false, hold_sends = false;
  std::set<std::string> mute;  // devices whose sends are not acknowledged
  std::chrono::milliseconds retry{50};
  fake_verbs::Counts counts;
  std::map<std::pair<std::string, uint32_t>, uint64_t> bytes;
  std::string last_violation;
  fake_verbs::Registration last_registration;
  uint32_t next_qp = 0x11;
  uint32_t next_key = 0x1000;

 private:
  Qp* peer_of(const Qp& qp) {
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

  static bool addressed(const Qp& qp, const fake_verbs::Port& port) {
    if (!qp.attr.ah_attr.is_global) return port.infiniband && qp.attr.ah_attr.dlid == port.lid;
    return std::any_of(port.gids.begin(), port.gids.end(), [&](const fake_verbs::Gid& gid) {
      uint8_t raw[16];
      return ::inet_pton(AF_INET6, gid.text.c_str(), raw) == 1 &&
             std::memcmp(raw, qp.attr.ah_attr.grh.dgid.raw, sizeof(raw)) == 0;
    });
  }

  // Null, and a violation, when the key does not allow it.
  Mr* find_mr(uint32_t key, bool remote, const ibv::Pd* pd, uint64_t address, uint64_t length) {
    for (Mr* mr : mrs) {
      if ((remote ? mr->rkey : mr->lkey) != key) continue;
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

  std::optional<Bytes> gather(Qp& qp, const Request& request) {
    if (request.wr.send_flags & ibv::kInline) return request.inlined;
    Bytes all;
    for (const ibv::Sge& where : request.where) {
      const Mr* mr = find_mr(where.lkey, false, qp.pd, where.addr, where.length);
      if (!mr) return std::nullopt;
      const auto* from = static_cast<const std::byte*>(mr->addr) + (where.addr - mr->iova);
      all.insert(all.end(), from, from + where.length);
    }
    return all;
  }

  // Carries out the first send of `qp`. False: it has to wait.
  bool step(Qp& qp, Clock::time_point now) {
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
    const auto data = gather(qp, request);
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
        std::memcpy(static_cast<std::byte*>(mr->addr) + (request.wr.remote_addr - mr->iova),
                    data->data(), data->size());
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

  void run() {
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

  bool stopping_ = false;
  std::thread worker_;
};

World& world() {
  static World instance;
  return instance;
}

int poll_cq(ibv::Cq* raw, int room, ibv::Wc* wc) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  if (all.injected("poll_cq")) return -1;
  auto& cq = static_cast<Cq&>(*raw);
  int count = 0;
  for (; count < room && !cq.queue.empty(); ++count) {
    const Completion& completion = cq.queue.front();
    wc[count] = completion.wc;
    completion.qp->occupied -= completion.retires;
    cq.queue.pop_front();
  }
  return count;
}

int req_notify_cq(ibv::Cq* raw, int) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  if (const int error = all.injected("req_notify_cq")) return error;
  static_cast<Cq&>(*raw).armed = true;
  return 0;
}

int post_send(ibv::Qp* raw, ibv::SendWr* wr, ibv::SendWr** bad) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  auto& qp = static_cast<Qp&>(*raw);
  ++all.counts.lists;
  for (; wr; wr = wr->next) {
    *bad = wr;
    if (const int error = all.injected("post_send")) return error;
    if (qp.occupied == qp.cap.max_send_wr) return ENOMEM;
    Request request;
    request.wr = *wr;
    request.where.assign(wr->sg_list, wr->sg_list + wr->num_sge);
    if (wr->send_flags & ibv::kInline) {
      for (const ibv::Sge& where : request.where) {
        const auto* from = reinterpret_cast<const std::byte*>(where.addr);
        request.inlined.insert(request.inlined.end(), from, from + where.length);
      }
      if (request.inlined.size() > qp.cap.max_inline_data) {
        all.violation("more inline than the queue pair takes");
        return EINVAL;
      }
      ++all.counts.inlined;
    }
    ++qp.occupied;
    ++(wr->opcode == ibv::kSend ? all.counts.sends : all.counts.writes);
    if (wr->send_flags & ibv::kSignaled) ++all.counts.signalled;
    if (qp.state == ibv::kError) {
      all.complete_send(qp, *wr, ibv::kFlushed);
    } else if (qp.state == ibv::kReadyToSend) {
      qp.sends.push_back(std::move(request));
    } else {
      all.violation("a send on a queue pair that is not connected");
      return EINVAL;
    }
  }
  all.changed.notify_all();
  return 0;
}

int post_recv(ibv::Qp* raw, ibv::RecvWr* wr, ibv::RecvWr** bad) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  auto& qp = static_cast<Qp&>(*raw);
  for (; wr; wr = wr->next) {
    *bad = wr;
    if (const int error = all.injected("post_recv")) return error;
    if (qp.receives.size() == qp.cap.max_recv_wr) return ENOMEM;
    if (qp.state == ibv::kError) {
      all.complete_receive(qp, wr->wr_id, ibv::kFlushed, 0);
    } else {
      qp.receives.emplace_back(wr->wr_id, *wr->sg_list);
    }
  }
  all.changed.notify_all();
  return 0;
}

template <typename T>
T* fail(int error) {
  errno = error;
  return nullptr;
}

}  // namespace

extern "C" {

int ibv_fork_init() { return 0; }

ibv::Device** ibv_get_device_list(int* count) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  if (const int error = all.injected("get_device_list")) return fail<ibv::Device*>(error);
  auto** list = new ibv::Device*[all.handles.size() + 1]();
  for (size_t i = 0; i < all.handles.size(); ++i) list[i] = &all.handles[i];
  *count = static_cast<int>(all.handles.size());
  return list;
}

void ibv_free_device_list(ibv::Device** list) { delete[] list; }

const char* ibv_get_device_name(ibv::Device* device) { return device->facts->name.c_str(); }

ibv::Context* ibv_open_device(ibv::Device* device) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  if (const int error = all.injected("open_device")) return fail<ibv::Context>(error);
  auto* context = new Context{};
  context->device = device;
  context->facts = device->facts;
  context->ops.poll_cq = poll_cq;
  context->ops.req_notify_cq = req_notify_cq;
  context->ops.post_send = post_send;
  context->ops.post_recv = post_recv;
  context->async_fd = ::eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
  context->cmd_fd = -1;
  all.contexts.insert(context);
  return context;
}

int ibv_close_device(ibv::Context* raw) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  auto* context = static_cast<Context*>(raw);
  for (const ibv::Pd* pd : all.pds) {
    if (pd->context == raw) all.violation("a device closed with a protection domain left");
  }
  all.contexts.erase(context);
  ::close(context->async_fd);
  delete context;
  return 0;
}

int ibv_query_device(ibv::Context* raw, ibv::DeviceAttr* attr) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  if (const int error = all.injected("query_device")) return error;
  const fake_verbs::Device& facts = *static_cast<Context*>(raw)->facts;
  *attr = {};
  attr->max_mr_size = facts.max_mr_size;
  attr->max_qp_wr = facts.max_qp_wr;
  attr->max_cqe = facts.max_cqe;
  attr->max_srq = facts.max_srq;
  attr->max_sge = 1;
  attr->phys_port_cnt = static_cast<uint8_t>(facts.ports.size());
  return 0;
}

int ibv_query_port(ibv::Context* raw, uint8_t number, ibv::PortAttr* attr) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  if (const int error = all.injected("query_port")) return error;
  const fake_verbs::Port& port = static_cast<Context*>(raw)->facts->ports.at(number - 1u);
  *attr = {};
  attr->state = port.active ? ibv::kPortActive : ibv::kPortDown;
  attr->max_mtu = attr->active_mtu = port.mtu;
  attr->gid_tbl_len = static_cast<int>(port.gids.size()) + 3;  // some places are empty
  attr->max_msg_sz = port.max_message;
  attr->lid = port.lid;
  attr->active_width = port.width;
  attr->active_speed = port.speed;
  attr->link_layer = port.infiniband ? ibv::kLinkInfiniBand : ibv::kLinkEthernet;
  return 0;
}

int _ibv_query_gid_ex(ibv::Context* raw, uint32_t number, uint32_t index, ibv::GidEntry* entry,
                      uint32_t, size_t size) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  if (const int error = all.injected("query_gid")) return error;
  const fake_verbs::Port& port = static_cast<Context*>(raw)->facts->ports.at(number - 1u);
  if (index >= port.gids.size() || size != sizeof(*entry)) return ENODATA;
  *entry = {};
  entry->gid_index = index;
  entry->port_num = number;
  entry->gid_type = port.infiniband ? ibv::kGidInfiniBand : port.gids[index].type;
  return ::inet_pton(AF_INET6, port.gids[index].text.c_str(), entry->gid.raw) == 1 ? 0 : EINVAL;
}

int ibv_get_async_event(ibv::Context* raw, ibv::AsyncEvent* event) {
  uint64_t one;
  if (::read(raw->async_fd, &one, sizeof(one)) != sizeof(one)) return -1;
  World& all = world();
  const std::lock_guard lock(all.mutex);
  auto& events = static_cast<Context*>(raw)->events;
  if (events.empty()) {  // what it was about is gone
    errno = EAGAIN;
    return -1;
  }
  *event = events.front();
  events.pop_front();
  if (is_about_qp(*event)) ++static_cast<Qp*>(event->element.qp)->events_out;
  return 0;
}

void ibv_ack_async_event(ibv::AsyncEvent* event) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  if (is_about_qp(*event)) --static_cast<Qp*>(event->element.qp)->events_out;
  all.changed.notify_all();
}

ibv::Pd* ibv_alloc_pd(ibv::Context* context) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  if (const int error = all.injected("alloc_pd")) return fail<ibv::Pd>(error);
  auto* pd = new ibv::Pd{context, 0};
  all.pds.insert(pd);
  return pd;
}

int ibv_dealloc_pd(ibv::Pd* pd) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  for (const Mr* mr : all.mrs) {
    if (mr->pd == pd) all.violation("a protection domain freed with memory left");
  }
  for (const auto& [number, qp] : all.qps) {
    if (qp->pd == pd) all.violation("a protection domain freed with a queue pair left");
  }
  all.pds.erase(pd);
  delete pd;
  return 0;
}

static ibv::Mr* register_memory(ibv::Pd* pd, void* address, fake_verbs::Registration asked) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  if (const int error = all.injected(asked.fd < 0 ? "reg_mr" : "reg_dmabuf_mr")) {
    return fail<ibv::Mr>(error);
  }
  if (asked.length > static_cast<Context*>(pd->context)->facts->max_mr_size) {
    return fail<ibv::Mr>(EINVAL);
  }
  auto* mr = new Mr{};
  mr->context = pd->context;
  mr->pd = pd;
  mr->addr = address;
  mr->length = asked.length;
  mr->lkey = all.next_key++;
  mr->rkey = all.next_key++;
  mr->iova = asked.iova;
  mr->access = asked.access;
  all.mrs.insert(mr);
  all.last_registration = asked;
  ++all.counts.registrations;
  return mr;
}

ibv::Mr* ibv_reg_mr_iova2(ibv::Pd* pd, void* address, size_t length, uint64_t iova,
                          unsigned access) {
  return register_memory(pd, address, {-1, 0, length, iova, access});
}

ibv::Mr* ibv_reg_dmabuf_mr(ibv::Pd* pd, uint64_t offset, size_t length, uint64_t iova, int fd,
                           int access) {
  return register_memory(pd, reinterpret_cast<void*>(iova),
                         {fd, offset, length, iova, static_cast<unsigned>(access)});
}

int ibv_dereg_mr(ibv::Mr* raw) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  auto* mr = static_cast<Mr*>(raw);
  all.mrs.erase(mr);
  delete mr;
  return 0;
}

ibv::CompChannel* ibv_create_comp_channel(ibv::Context* context) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  if (const int error = all.injected("create_comp_channel")) return fail<ibv::CompChannel>(error);
  auto* channel = new Channel{};
  channel->context = context;
  channel->fd = ::eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
  all.channels.insert(channel);
  return channel;
}

int ibv_destroy_comp_channel(ibv::CompChannel* raw) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  auto* channel = static_cast<Channel*>(raw);
  for (const Cq* cq : all.cqs) {
    if (cq->channel == raw) all.violation("a channel destroyed before its completion queue");
  }
  all.channels.erase(channel);
  ::close(channel->fd);
  delete channel;
  return 0;
}

ibv::Cq* ibv_create_cq(ibv::Context* context, int entries, void* cq_context,
                       ibv::CompChannel* channel, int) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  if (const int error = all.injected("create_cq")) return fail<ibv::Cq>(error);
  auto* cq = new Cq{};
  cq->context = context;
  cq->channel = channel;
  cq->cq_context = cq_context;
  cq->cqe = entries;
  all.cqs.insert(cq);
  return cq;
}

int ibv_destroy_cq(ibv::Cq* raw) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  auto* cq = static_cast<Cq*>(raw);
  if (cq->unacknowledged > 0) all.violation("a completion queue destroyed with events not acked");
  for (const auto& [number, qp] : all.qps) {
    if (qp->send_cq == raw) all.violation("a completion queue destroyed before its queue pair");
  }
  std::erase(static_cast<Channel&>(*cq->channel).events, raw);
  all.cqs.erase(cq);
  delete cq;
  return 0;
}

int ibv_get_cq_event(ibv::CompChannel* raw, ibv::Cq** cq, void** cq_context) {
  uint64_t one;
  if (::read(raw->fd, &one, sizeof(one)) != sizeof(one)) return -1;
  World& all = world();
  const std::lock_guard lock(all.mutex);
  auto& events = static_cast<Channel*>(raw)->events;
  if (events.empty()) {
    errno = EAGAIN;
    return -1;
  }
  *cq = events.front();
  events.pop_front();
  *cq_context = (*cq)->cq_context;
  ++static_cast<Cq&>(**cq).unacknowledged;
  return 0;
}

void ibv_ack_cq_events(ibv::Cq* cq, unsigned count) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  static_cast<Cq*>(cq)->unacknowledged -= count;
}

ibv::Qp* ibv_create_qp(ibv::Pd* pd, ibv::QpInitAttr* init) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  if (const int error = all.injected("create_qp")) return fail<ibv::Qp>(error);
  auto& context = static_cast<Context&>(*pd->context);
  if (init->srq && context.facts->max_srq == 0) return fail<ibv::Qp>(ENOSYS);
  const auto limit = static_cast<uint32_t>(context.facts->max_qp_wr);
  if (init->cap.max_send_wr > limit || init->cap.max_recv_wr > limit ||
      init->cap.max_inline_data > context.facts->max_inline) {
    return fail<ibv::Qp>(EINVAL);
  }
  auto* qp = new Qp{};
  qp->context = pd->context;
  qp->pd = pd;
  qp->send_cq = init->send_cq;
  qp->recv_cq = init->recv_cq;
  qp->qp_num = all.next_qp++;
  qp->state = ibv::kReset;
  qp->qp_type = init->qp_type;
  qp->facts = context.facts;
  qp->cap = init->cap;
  all.qps[qp->qp_num] = qp;
  return qp;
}

int ibv_modify_qp(ibv::Qp* raw, ibv::QpAttr* attr, int mask) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  static const std::map<uint32_t, const char*> names{{ibv::kInit, "modify_qp_init"},
                                                     {ibv::kReadyToReceive, "modify_qp_rtr"},
                                                     {ibv::kReadyToSend, "modify_qp_rts"},
                                                     {ibv::kError, "modify_qp_err"}};
  if (const int error = all.injected(names.at(attr->qp_state))) return error;
  auto& qp = static_cast<Qp&>(*raw);
  const int rtr = ibv::kMaskState | ibv::kMaskAddress | ibv::kMaskPathMtu | ibv::kMaskDestQpNum |
                  ibv::kMaskReceivePsn | ibv::kMaskMaxDestReadAtomic | ibv::kMaskMinRnrTimer;
  const int rts = ibv::kMaskState | ibv::kMaskTimeout | ibv::kMaskRetryCount | ibv::kMaskRnrRetry |
                  ibv::kMaskSendPsn | ibv::kMaskMaxReadAtomic;
  const int init = ibv::kMaskState | ibv::kMaskPkeyIndex | ibv::kMaskPort | ibv::kMaskAccess;
  const bool allowed =
      (attr->qp_state == ibv::kInit && qp.state == ibv::kReset && mask == init) ||
      (attr->qp_state == ibv::kReadyToReceive && qp.state == ibv::kInit && mask == rtr) ||
      (attr->qp_state == ibv::kReadyToSend && qp.state == ibv::kReadyToReceive && mask == rts) ||
      (attr->qp_state == ibv::kError && mask == ibv::kMaskState);
  if (!allowed) {
    all.violation("a change of a queue pair's state that is not allowed");
    return EINVAL;
  }
  if (attr->qp_state == ibv::kError) {
    all.to_error(qp);
    return 0;
  }
  if (mask == init) {
    qp.attr.port_num = attr->port_num;
    qp.attr.qp_access_flags = attr->qp_access_flags;
  } else if (mask == rtr) {
    qp.attr.ah_attr = attr->ah_attr;
    qp.attr.dest_qp_num = attr->dest_qp_num;
    qp.attr.rq_psn = attr->rq_psn;
    qp.attr.path_mtu = attr->path_mtu;
    const fake_verbs::Port& port = all.port_of(qp);
    if (attr->path_mtu > port.mtu ||
        (attr->ah_attr.is_global && attr->ah_attr.grh.sgid_index >= port.gids.size())) {
      return EINVAL;
    }
  } else {
    qp.attr.sq_psn = attr->sq_psn;
    qp.attr.timeout = attr->timeout;
    qp.attr.retry_cnt = attr->retry_cnt;
    qp.attr.rnr_retry = attr->rnr_retry;
  }
  qp.state = attr->qp_state;
  all.changed.notify_all();
  return 0;
}

int ibv_destroy_qp(ibv::Qp* raw) {
  World& all = world();
  std::unique_lock lock(all.mutex);
  auto* qp = static_cast<Qp*>(raw);
  all.changed.wait(lock, [&] { return qp->events_out == 0; });
  std::erase_if(static_cast<Context*>(qp->context)->events, [&](const ibv::AsyncEvent& event) {
    return is_about_qp(event) && event.element.qp == raw;
  });
  for (Cq* cq : all.cqs) {
    std::erase_if(cq->queue, [&](const Completion& completion) { return completion.qp == qp; });
  }
  std::erase_if(all.held, [&](const auto& entry) { return entry.second.qp == qp; });
  all.qps.erase(qp->qp_num);
  delete qp;
  return 0;
}

const char* ibv_wc_status_str(ibv::WcStatus status) {
  switch (status) {
    case ibv::kSuccess: return "success";
    case ibv::kFlushed: return "Work Request Flushed Error";
    case ibv::kRemoteAccessError: return "remote access error";
    case ibv::kRetryExceeded: return "transport retry counter exceeded";
    case ibv::kRnrRetryExceeded: return "RNR retry counter exceeded";
    default: return "another error";
  }
}

}  // extern "C"

namespace fake_verbs {

std::vector<Device> default_devices() {
  std::vector<Device> devices(2);
  for (size_t i = 0; i < devices.size(); ++i) {
    devices[i].name = "fake" + std::to_string(i);
    devices[i].ports.resize(1);
    devices[i].ports[0].gids = {{2, "fe80::" + std::to_string(i + 1)},
                                {2, "::ffff:10.9." + std::to_string(i) + ".1"}};
  }
  return devices;
}

void reset(std::vector<Device> devices) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  all.forget_faults();
  all.counts = {};
  all.bytes.clear();
  all.last_violation.clear();
  all.set_devices(devices);
}

std::string library_path() {
  Dl_info info{};
  ::dladdr(reinterpret_cast<void*>(&ibv_fork_init), &info);
  return info.dli_fname;
}

void fail_calls(const std::string& function, int error, int skip, int times) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  all.faults[function] = {error, skip, times};
}

void set_port(const std::string& device, uint32_t port, bool active) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  for (Device& facts : all.devices) {
    if (facts.name == device) facts.ports.at(port - 1u).active = active;
  }
  for (Context* context : all.contexts) {
    if (context->facts->name != device) continue;
    ibv::AsyncEvent event{};
    event.element.port_num = static_cast<int>(port);
    event.event_type = active ? ibv::kPortUp : ibv::kPortError;
    all.add_event(*context, event);
  }
  all.changed.notify_all();
}

void set_retry_ms(uint32_t milliseconds) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  all.retry = std::chrono::milliseconds(milliseconds);
}

void break_queue_pairs(const std::string& device, bool with_event) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  for (const auto& [number, qp] : all.qps) {
    if (qp->facts->name != device ||
        (qp->state != ibv::kReadyToSend && qp->state != ibv::kReadyToReceive)) {
      continue;
    }
    all.to_error(*qp);
    if (!with_event) continue;
    ibv::AsyncEvent event{};
    event.element.qp = qp;
    event.event_type = ibv::kQpFatal;
    all.add_event(static_cast<Context&>(*qp->context), event);
  }
}

void hold_send_completions(bool hold) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  all.hold_completions = hold;
  if (hold) return;
  for (const auto& [cq, completion] : std::exchange(all.held, {})) all.push(cq, completion);
}

void hold_sends(bool hold) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  all.hold_sends = hold;
  all.changed.notify_all();
}

void lose_acknowledgements(const std::string& device, bool lose) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  if (lose) {
    all.mute.insert(device);
  } else {
    all.mute.erase(device);
  }
}

Objects objects() {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  const auto count = [](const auto& set) { return static_cast<int>(set.size()); };
  return {count(all.contexts), count(all.pds), count(all.mrs),
          count(all.channels), count(all.cqs), count(all.qps)};
}

Counts counts() {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  return all.counts;
}

void clear_counts() {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  all.counts = {};
}

std::string last_violation() {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  return all.last_violation;
}

uint64_t bytes_sent(const std::string& device, uint32_t port) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  return all.bytes[{device, port}];
}

Registration last_registration() {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  return all.last_registration;
}

}  // namespace fake_verbs

extern "C" {

bool fake_verbs_set_port(const char* device, uint32_t port, bool active) {
  {
    World& all = world();
    const std::lock_guard lock(all.mutex);
    const auto found =
        std::find_if(all.devices.begin(), all.devices.end(),
                     [&](const fake_verbs::Device& facts) { return facts.name == device; });
    if (found == all.devices.end() || port == 0 || port > found->ports.size()) return false;
  }
  fake_verbs::set_port(device, port, active);
  return true;
}

void fake_verbs_set_retry_ms(uint32_t milliseconds) { fake_verbs::set_retry_ms(milliseconds); }

void fake_verbs_break_queue_pairs(const char* device, bool with_event) {
  fake_verbs::break_queue_pairs(device, with_event);
}

void fake_verbs_hold_sends(bool hold) { fake_verbs::hold_sends(hold); }

void fake_verbs_lose_acknowledgements(const char* device, bool lose) {
  fake_verbs::lose_acknowledgements(device, lose);
}

void fake_verbs_fail_calls(const char* function, int error, int skip, int times) {
  fake_verbs::fail_calls(function, error, skip, times);
}

void fake_verbs_forget_faults() {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  all.forget_faults();
  all.changed.notify_all();
}

uint64_t fake_verbs_bytes_sent(const char* device, uint32_t port) {
  return fake_verbs::bytes_sent(device, port);
}

uint64_t fake_verbs_violations() { return fake_verbs::counts().violations; }

uint64_t fake_verbs_objects() { return static_cast<uint64_t>(fake_verbs::objects().total()); }

uint32_t fake_verbs_remote_keys(uint32_t* keys, uint32_t room) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  uint32_t count = 0;
  for (const Mr* mr : all.mrs) {
    if (!(mr->access & ibv::kRemoteWrite)) continue;
    if (count < room) keys[count] = mr->rkey;
    ++count;
  }
  return count;
}

}  // extern "C"
