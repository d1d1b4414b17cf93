#ifndef KVXFER_TRANSPORT_VERBS_QUEUE_PAIR_H_
#define KVXFER_TRANSPORT_VERBS_QUEUE_PAIR_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvxfer/verbs.h"
#include "transport/verbs/address.h"
#include "transport/verbs/rail.h"

namespace kvxfer::ibv {

// One piece of page-aligned memory of ours that adapters read and write, and forked children never
// see.
class DmaBuffer {
 public:
  // Throws Error(kNoResources).
  DmaBuffer(const Nic& nic, size_t bytes);
  ~DmaBuffer();
  DmaBuffer(const DmaBuffer&) = delete;
  DmaBuffer& operator=(const DmaBuffer&) = delete;

  std::byte* at(size_t offset) const { return memory_ + offset; }
  uint32_t lkey() const { return mr_->lkey; }

 private:
  std::byte* memory_ = nullptr;
  size_t bytes_ = 0;
  uint64_t generation_ = 0;
  Handle<Mr> mr_;
};

// A reliable connection without a shared receive queue, with a completion queue of its own that can
// hold everything at once, and buffers for the notices. Not thread-safe: posting may be done by one
// thread while another polls.
class QueuePair {
 public:
  // Makes it and posts the receives. Throws Error(kNoResources).
  QueuePair(const Rail& rail, const VerbsOptions& options);
  ~QueuePair() = default;

  const QpAddress& address() const { return address_; }
  uint32_t number() const { return address_.number; }
  bool uses(const Cq* cq) const { return cq_.get() == cq; }
  int event_fd() const { return channel_->fd; }
  // Work requests that may be under way at once, without the one that is kept for drain().
  uint32_t send_depth() const { return send_depth_; }
  uint32_t receives() const { return receives_; }
  uint32_t max_inline() const { return max_inline_; }
  uint32_t max_message() const { return max_message_; }

  // From the peer's side of the path to ready. Throws Error(kNoResources).
  void connect(const RailAddress& remote, const QpAddress& remote_qp, const PortGid& ours,
               const PortGid& theirs);

  // Posts a chain. Returns 0, or an errno value with the first that was not posted in `bad`.
  int post(SendWr* first, SendWr** bad);

  // Where SEND number `sequence` has its bytes, kNoticeBytes long. Free again when it is complete.
  std::byte* send_buffer(uint64_t sequence) const {
    return buffer_->at((receives_ + sequence % send_slots_) * kNoticeBytes);
  }
  uint32_t buffer_lkey() const { return buffer_->lkey(); }

  std::byte* receive_buffer(uint64_t index) const { return buffer_->at(index * kNoticeBytes); }
  int post_receive(uint64_t index);  // an errno value, or 0

  // Completions, at most `room`. Negative: the queue is broken.
  int poll(std::span<Wc> room) {
    return context()->ops.poll_cq(cq_.get(), count(room), room.data());
  }
  // Has event_fd() become readable with the next completion; 0 or an errno value.
  int arm() { return context()->ops.req_notify_cq(cq_.get(), 0); }
  // Takes what made event_fd() readable.
  void take_events();

  // Nothing is sent or received any more, and what is under way completes with an error. Behind the
  // last of the sends one with `marker` as id completes, unless this returns false.
  bool flush(uint64_t marker);

 private:
  Context* context() const { return nic_->context.get(); }
  static int count(std::span<Wc> room) { return static_cast<int>(room.size()); }

  const std::shared_ptr<Nic> nic_;
  const uint8_t port_;
  const uint8_t mtu_;
  const bool ethernet_;
  const uint32_t max_message_;
  const VerbsOptions options_;
  uint32_t send_depth_ = 0;
  uint32_t send_slots_ = 0;
  uint32_t receives_ = 0;
  uint32_t max_inline_ = 0;
  QpAddress address_;

  // In this order, so that each goes before what it uses.
  Handle<CompChannel> channel_;
  Handle<Cq> cq_;
  std::unique_ptr<DmaBuffer> buffer_;
  Handle<Qp> qp_;
};

}  // namespace kvxfer::ibv

#endif  // KVXFER_TRANSPORT_VERBS_QUEUE_PAIR_H_
