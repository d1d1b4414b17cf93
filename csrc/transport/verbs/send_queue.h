#ifndef KVXFER_TRANSPORT_VERBS_SEND_QUEUE_H_
#define KVXFER_TRANSPORT_VERBS_SEND_QUEUE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "transport/verbs/direct.h"
#include "transport/verbs/queue_pair.h"

namespace kvxfer::ibv {

// What a link has done since it was made.
struct Counts {
  uint64_t work_requests = 0;  // given to adapters to send, commits included
  uint64_t posts = 0;          // calls that gave them, in lists
  uint64_t completions = 0;
  uint64_t wakeups = 0;  // times that a thread had slept until there was one
  uint64_t failovers = 0;
};

// One call of Link::write() or write_direct().
struct Write {
  uint64_t id = 0;
  uint64_t token = 0;
  std::shared_ptr<const LocalMemory> from;  // null: no bytes
  std::shared_ptr<const Target> to;
  std::vector<std::byte> notice;
  uint16_t stripes = 1;
  uint16_t stripes_left = 1;  // not acknowledged
  bool failed = false;
};

// The part of a write that one queue pair carries. The first stripe brings the notice.
struct Stripe {
  std::shared_ptr<Write> write;
  std::vector<DirectPiece> pieces;
  uint64_t size = 0;  // of all
  bool with_notice = false;
};

// Turns stripes into work requests: RDMA WRITEs, then SENDs with the notice. As many as the queue
// pair has room for are posted, in lists of which the last is signalled; the rest waits.
// Not thread-safe.
class SendQueue {
 public:
  // `remote_rail`: of the peer. What is posted is added to `counts`. All outlive this.
  SendQueue(QueuePair& qp, size_t nic, size_t remote_rail, Counts& counts)
      : qp_(qp), nic_(nic), remote_rail_(remote_rail), counts_(counts) {}

  static constexpr uint64_t kIdBit = uint64_t{1} << 62;  // marks the ids of our work requests

  void add(Stripe stripe);

  // Posts what fits. Returns 0, or an errno value that ends the queue pair. `again` is set when the
  // adapter has no room though nothing is under way that could make some: try once more, later.
  int pump(bool& again);

  // A work request has completed, and all before it. Writes that are acknowledged as a whole are
  // appended to `done`.
  void complete(uint64_t wr_id, std::vector<std::shared_ptr<Write>>& done);

  // The next `count` stripes have arrived, though no completion says so. False: so many were not
  // under way.
  bool acknowledge(uint64_t count, std::vector<std::shared_ptr<Write>>& done);

  // Takes away all that are not acknowledged.
  std::deque<Stripe> take();

  uint64_t completed_stripes() const { return completed_stripes_; }
  uint64_t queued_bytes() const { return queued_bytes_; }

 private:
  struct Entry {
    Stripe stripe;
    size_t piece = 0;        // the first that is not posted as a whole
    uint64_t written = 0;    // of its bytes, posted
    uint32_t noticed = 0;    // of the notice, posted
    uint64_t last_send = 0;  // number of the work request that ends it; 0: not posted
  };
  struct Cursor {
    size_t next;
    size_t piece;
    uint64_t written;
    uint32_t noticed;
  };

  uint64_t under_way() const { return posted_ - completed_; }
  bool build(SendWr& request, Sge& where, uint64_t number);  // false: there is nothing
  void rewind(const Cursor& cursor);
  void finish_front(std::vector<std::shared_ptr<Write>>& done);

  QueuePair& qp_;
  const size_t nic_;
  const size_t remote_rail_;
  Counts& counts_;

  std::deque<Entry> entries_;  // not acknowledged
  size_t next_ = 0;            // the first that is not posted as a whole
  uint64_t posted_ = 0;        // work requests; they are numbered from 1
  uint64_t completed_ = 0;
  uint64_t last_signalled_ = 0;
  bool was_full_ = false;
  uint64_t completed_stripes_ = 0;
  uint64_t queued_bytes_ = 0;
};

}  // namespace kvxfer::ibv

#endif  // KVXFER_TRANSPORT_VERBS_SEND_QUEUE_H_
