#include "transport/tcp/data_stream.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "kvxfer/transport.h"
#include "transport/common/socket.h"

namespace kvxfer {
namespace {

constexpr uint32_t kMagic = 0x5758564b;  // "KVXW"
// Other streams of the same loop get their turn after so many bytes.
constexpr uint64_t kBytesPerTurn = 4u << 20;

template <typename T>
std::byte* store(std::byte* to, T value) {
  for (size_t i = 0; i < sizeof(T); ++i) *to++ = static_cast<std::byte>(value >> (8 * i));
  return to;
}

template <typename T>
const std::byte* load(const std::byte* from, T& value) {
  value = 0;
  for (size_t i = 0; i < sizeof(T); ++i) value |= static_cast<T>(*from++) << (8 * i);
  return from;
}

}  // namespace

DataStream::DataStream(std::shared_ptr<EventLoop> loop, UniqueFd fd)
    : loop_(std::move(loop)), fd_(std::move(fd)) {}

DataStream::~DataStream() { loop_->remove(fd_.get()); }

void DataStream::watch(EventLoop::Handler handler) {
  const std::lock_guard lock(mutex_);
  loop_->add(fd_.get(), EPOLLIN | (want_out_ ? EPOLLOUT : 0u), std::move(handler));
}

// Sends from byte `sent` of head and source together until all is sent or the socket takes no more.
DataStream::Failure DataStream::send_some(std::span<const std::byte> head,
                                          std::span<const std::byte> source, size_t& sent) {
  const size_t total = head.size() + source.size();
  while (sent < total) {
    std::array<iovec, 2> parts;
    size_t count = 0;
    if (sent < head.size()) {
      parts[count++] = {const_cast<std::byte*>(head.data()) + sent, head.size() - sent};
    }
    const size_t skip = sent > head.size() ? sent - head.size() : 0;
    if (skip < source.size()) {
      parts[count++] = {const_cast<std::byte*>(source.data()) + skip, source.size() - skip};
    }
    msghdr request{};
    request.msg_iov = parts.data();
    request.msg_iovlen = count;
    const ssize_t bytes = ::sendmsg(fd_.get(), &request, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (bytes < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return std::nullopt;
      return "data stream to " + peer_address(fd_.get()) + " was lost: " + error_text(errno);
    }
    sent += static_cast<size_t>(bytes);
  }
  return std::nullopt;
}

DataStream::Failure DataStream::write(std::span<const std::byte> source, uint64_t offset,
                                      std::span<const std::byte> notice, uint64_t token,
                                      std::vector<Written>& done) {
  std::vector<std::byte> head(kHeader + notice.size());
  std::byte* to = store(head.data(), kMagic);
  to = store(to, static_cast<uint32_t>(notice.size()));
  to = store(to, static_cast<uint64_t>(source.size()));
  to = store(to, offset);
  std::copy(notice.begin(), notice.end(), to);

  const size_t total = head.size() + source.size();
  queued_.fetch_add(total, std::memory_order_relaxed);
  const std::lock_guard lock(mutex_);
  size_t sent = 0;
  Failure failure;
  if (!abandoned_ && queue_.empty()) failure = send_some(head, source, sent);
  if (abandoned_ || sent == total) {
    queued_.fetch_sub(total, std::memory_order_relaxed);
    done.push_back({token, !abandoned_});
    return failure;
  }
  queued_.fetch_sub(sent, std::memory_order_relaxed);
  queue_.push_back({std::move(head), source, token, sent});
  if (!std::exchange(want_out_, true)) loop_->modify(fd_.get(), EPOLLIN | EPOLLOUT);
  return failure;
}

DataStream::Failure DataStream::flush(std::vector<Written>& done) {
  const std::lock_guard lock(mutex_);
  while (!queue_.empty()) {
    Outgoing& next = queue_.front();
    const size_t before = next.sent;
    const Failure failure = send_some(next.head, next.source, next.sent);
    queued_.fetch_sub(next.sent - before, std::memory_order_relaxed);
    if (failure) return failure;
    if (next.sent < next.head.size() + next.source.size()) return std::nullopt;
    done.push_back({next.token, true});
    queue_.pop_front();
  }
  if (std::exchange(want_out_, false)) loop_->modify(fd_.get(), EPOLLIN);
  return std::nullopt;
}

void DataStream::abandon(std::vector<Written>& done) {
  const std::lock_guard lock(mutex_);
  abandoned_ = true;
  for (const Outgoing& write : queue_) done.push_back({write.token, false});
  queue_.clear();
  queued_.store(0, std::memory_order_relaxed);
}

DataStream::Failure DataStream::parse_header() {
  uint32_t magic, notice;
  const std::byte* from = load(header_.data(), magic);
  from = load(from, notice);
  from = load(from, size_);
  load(from, offset_);
  if (magic != kMagic || notice > kMaxNotice || size_ > kMaxWrite) {
    return "data stream from " + peer_address(fd_.get()) +
           " is out of step: it carries no header where one is due, so the peer does not speak "
           "this "
           "protocol";
  }
  notice_.resize(notice);
  return std::nullopt;
}

DataStream::Failure DataStream::advance(Receiver& receiver, bool& go_on) {
  received_ = 0;
  switch (part_) {
    case Part::kHeader:
      if (Failure failure = parse_header()) return failure;
      part_ = Part::kNotice;
      if (!notice_.empty()) return std::nullopt;
      [[fallthrough]];
    case Part::kNotice:
      destination_ = receiver.incoming(offset_, size_, notice_);
      part_ = Part::kBytes;
      if (size_ > 0) return std::nullopt;
      [[fallthrough]];
    case Part::kBytes:
      part_ = Part::kHeader;
      go_on = receiver.landed(notice_, destination_ != nullptr);
  }
  return std::nullopt;
}

DataStream::Failure DataStream::receive(Receiver& receiver) {
  // For what nobody wants. On the stack: memory of threads that the C library has to find first
  // ends the process where there is none.
  std::array<std::byte, 64u << 10> scratch;
  bool go_on = true;
  for (uint64_t budget = kBytesPerTurn; go_on && budget > 0;) {
    std::byte* to = destination_;
    size_t size = size_;
    if (part_ == Part::kHeader) {
      to = header_.data();
      size = kHeader;
    } else if (part_ == Part::kNotice) {
      to = notice_.data();
      size = notice_.size();
    }
    size_t wanted = size - received_;
    if (to) {
      to += received_;
    } else {
      to = scratch.data();
      wanted = std::min(wanted, scratch.size());
    }
    const ssize_t count = ::recv(fd_.get(), to, wanted, MSG_DONTWAIT);
    if (count < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return std::nullopt;
      return "data stream from " + peer_address(fd_.get()) + " was lost: " + error_text(errno);
    }
    if (count == 0) return "the peer closed a data stream";
    received_ += static_cast<size_t>(count);
    budget -= std::min(budget, static_cast<uint64_t>(count));
    if (received_ < size) continue;
    if (Failure failure = advance(receiver, go_on)) return failure;
  }
  return std::nullopt;
}

void DataStream::shutdown() { ::shutdown(fd_.get(), SHUT_RDWR); }

}  // namespace kvxfer
