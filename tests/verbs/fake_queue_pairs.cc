// The calls of libibverbs about completion queues and queue pairs.

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "fake_world.h"

namespace fake_verbs::detail {
namespace {

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
    if (wr->opcode == ibv::kSend && !(wr->send_flags & ibv::kInline)) ++all.counts.fetched_sends;
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

}  // namespace

void set_data_path(ibv::ContextOps& ops) {
  ops.poll_cq = poll_cq;
  ops.req_notify_cq = req_notify_cq;
  ops.post_send = post_send;
  ops.post_recv = post_recv;
}

}  // namespace fake_verbs::detail

using namespace fake_verbs::detail;

extern "C" {

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
  std::unique_lock lock(all.mutex);
  auto* cq = static_cast<Cq*>(raw);
  all.changed.wait(lock, [&] { return cq->events_out == 0; });
  std::erase_if(static_cast<Context*>(cq->context)->events, [&](const ibv::AsyncEvent& event) {
    return event.event_type == ibv::kCqError && event.element.cq == raw;
  });
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
    return event.event_type == ibv::kQpFatal && event.element.qp == raw;
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
