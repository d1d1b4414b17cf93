#include "transport/verbs/send_queue.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "transport/verbs/notice.h"

namespace kvxfer::ibv {
namespace {

constexpr size_t kLongestList = 32;

}  // namespace

void SendQueue::add(Stripe stripe) {
  queued_bytes_ += stripe.size;
  entries_.push_back({std::move(stripe)});
}

bool SendQueue::build(SendWr& request, Sge& where, uint64_t number) {
  if (next_ == entries_.size()) return false;
  Entry& entry = entries_[next_];
  const Stripe& stripe = entry.stripe;
  const Write& write = *stripe.write;
  request = {};
  request.wr_id = number | kIdBit;
  request.sg_list = &where;
  request.num_sge = 1;
  if (entry.piece < stripe.pieces.size()) {
    const DirectPiece& piece = stripe.pieces[entry.piece];
    const std::byte* from = piece.source + entry.written;
    const uint64_t to = piece.offset + entry.written;
    const VerbsMemory& memory = write.from->part_of(from);
    const uint64_t size = std::min({piece.bytes - entry.written, uint64_t{qp_.max_message()},
                                    memory.piece_left(from), write.to->piece_left(to)});
    where = {reinterpret_cast<uint64_t>(from), static_cast<uint32_t>(size),
             memory.lkey(nic_, from)};
    request.opcode = kRdmaWrite;
    request.remote_addr = write.to->address(to);
    request.rkey = write.to->rkey(remote_rail_, to);
    entry.written += size;
    if (entry.written == piece.bytes) {
      ++entry.piece;
      entry.written = 0;
    }
    return true;
  }
  NoticeHeader header;
  header.write = write.id;
  header.notice_bytes = static_cast<uint32_t>(write.notice.size());
  header.notice_at = entry.noticed;
  header.stripes = write.stripes;
  const uint32_t left = stripe.with_notice ? header.notice_bytes - entry.noticed : 0;
  const uint32_t piece = std::min(left, kNoticePiece);
  header.ends_stripe = piece == left;

  std::byte* buffer = qp_.send_buffer(number);
  header.store(buffer);
  const auto from = write.notice.begin() + static_cast<ptrdiff_t>(entry.noticed);
  std::copy(from, from + piece, buffer + NoticeHeader::kBytes);
  where = {reinterpret_cast<uint64_t>(buffer), NoticeHeader::kBytes + piece, qp_.buffer_lkey()};
  request.opcode = kSend;
  if (where.length <= qp_.max_inline()) request.send_flags = kInline;
  entry.noticed += piece;
  if (header.ends_stripe) {
    entry.last_send = number;
    ++next_;
  }
  return true;
}

void SendQueue::rewind(const Cursor& cursor) {
  for (size_t i = cursor.next; i < entries_.size() && i <= next_; ++i) {
    entries_[i].piece = i == cursor.next ? cursor.piece : 0;
    entries_[i].written = i == cursor.next ? cursor.written : 0;
    entries_[i].noticed = i == cursor.next ? cursor.noticed : 0;
    entries_[i].last_send = 0;
  }
  next_ = cursor.next;
}

int SendQueue::pump(bool& again) {
  again = false;
  // Once it was full it is filled again by halves: longer lists, and fewer completions to look at.
  if (was_full_ && under_way() > qp_.send_depth() / 2) return 0;
  was_full_ = false;
  std::array<SendWr, kLongestList> requests;
  std::array<Sge, kLongestList> where;
  while (next_ < entries_.size() && under_way() < qp_.send_depth()) {
    const Entry& at = entries_[next_];
    const Cursor before{next_, at.piece, at.written, at.noticed};
    const size_t room = std::min<size_t>(kLongestList, qp_.send_depth() - under_way());
    size_t count = 0;
    while (count < room && build(requests[count], where[count], posted_ + count + 1)) {
      if (count > 0) requests[count - 1].next = &requests[count];
      ++count;
    }
    requests[count - 1].send_flags |= kSignaled;
    SendWr* bad = nullptr;
    const int error = qp_.post(requests.data(), &bad);
    ++counts_.posts;
    if (error == 0) {
      posted_ += count;
      counts_.work_requests += count;
      last_signalled_ = posted_;
      continue;
    }
    if (error != ENOMEM && error != EAGAIN) return error;
    // The adapter's queue is fuller than it said it could be. What it took stays posted.
    const size_t taken = bad ? static_cast<size_t>(bad - requests.data()) : 0;
    rewind(before);
    for (size_t i = 0; i < taken; ++i) build(requests[i], where[i], posted_ + i + 1);
    posted_ += taken;
    counts_.work_requests += taken;
    again = last_signalled_ <= completed_;
    return 0;
  }
  was_full_ = next_ < entries_.size();
  return 0;
}

void SendQueue::finish_front(std::vector<std::shared_ptr<Write>>& done) {
  Entry entry = std::move(entries_.front());
  entries_.pop_front();
  if (next_ > 0) --next_;
  ++completed_stripes_;
  queued_bytes_ -= entry.stripe.size;
  if (--entry.stripe.write->stripes_left == 0) done.push_back(std::move(entry.stripe.write));
}

void SendQueue::complete(uint64_t wr_id, std::vector<std::shared_ptr<Write>>& done) {
  completed_ = std::max(completed_, wr_id & ~kIdBit);
  while (!entries_.empty() && entries_.front().last_send != 0 &&
         entries_.front().last_send <= completed_) {
    finish_front(done);
  }
}

bool SendQueue::acknowledge(uint64_t count, std::vector<std::shared_ptr<Write>>& done) {
  for (; count > 0; --count) {
    if (entries_.empty() || entries_.front().last_send == 0) return false;
    finish_front(done);
  }
  return true;
}

std::deque<Stripe> SendQueue::take() {
  std::deque<Stripe> stripes;
  for (Entry& entry : entries_) stripes.push_back(std::move(entry.stripe));
  entries_.clear();
  next_ = 0;
  queued_bytes_ = 0;
  return stripes;
}

}  // namespace kvxfer::ibv
