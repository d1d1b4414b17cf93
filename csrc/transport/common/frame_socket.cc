#include "transport/common/frame_socket.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "kvxfer/transport.h"
#include "transport/common/socket.h"

namespace kvxfer {
namespace {

constexpr size_t kLength = 4;
constexpr size_t kHeader = kLength + 4;
constexpr size_t kReceiveBuffer = 64u << 10;
constexpr size_t kMaxQueued = 64u << 20;
// Other links of the same loop get their turn after so many system calls.
constexpr int kReceivesPerTurn = 16;

void store(std::byte* to, uint32_t value) {
  for (size_t i = 0; i < 4; ++i) to[i] = static_cast<std::byte>(value >> (8 * i));
}

uint32_t load(const std::byte* from) {
  uint32_t value = 0;
  for (size_t i = 0; i < 4; ++i) value |= std::to_integer<uint32_t>(from[i]) << (8 * i);
  return value;
}

// CRC-32 as in zlib, whose crc32(message, number) gives the same.
constexpr std::array<uint32_t, 256> kCrcTable = [] {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t rest = i;
    for (int bit = 0; bit < 8; ++bit) rest = (rest >> 1) ^ (rest & 1 ? 0xedb88320u : 0u);
    table[i] = rest;
  }
  return table;
}();

uint32_t check_of(std::span<const std::byte> message, uint32_t number) {
  uint32_t crc = ~number;
  for (const std::byte byte : message) {
    crc = kCrcTable[(crc ^ std::to_integer<uint32_t>(byte)) & 0xff] ^ (crc >> 8);
  }
  return ~crc;
}

std::string lost(int error) { return "the connection was lost: " + error_text(error); }

}  // namespace

FrameSocket::FrameSocket(std::shared_ptr<EventLoop> loop, UniqueFd fd)
    : loop_(std::move(loop)), fd_(std::move(fd)), in_(kReceiveBuffer) {}

FrameSocket::~FrameSocket() { loop_->remove(fd_.get()); }

void FrameSocket::watch(EventLoop::Handler handler) {
  const std::lock_guard lock(mutex_);
  loop_->add(fd_.get(), EPOLLIN | (want_out_ ? EPOLLOUT : 0u), std::move(handler));
}

FrameSocket::Failure FrameSocket::send(std::span<const std::byte> message) {
  if (message.size() > kMaxMessage) {
    return "a control message of " + std::to_string(message.size()) +
           " bytes is over the limit of " + std::to_string(kMaxMessage);
  }
  std::array<std::byte, kHeader> header;
  store(header.data(), static_cast<uint32_t>(message.size()));
  const size_t total = kHeader + message.size();

  const std::lock_guard lock(mutex_);
  store(header.data() + kLength, check_of(message, sent_++));
  size_t sent = 0;
  if (out_begin_ == out_.size()) {
    std::array<iovec, 2> parts{
        {{header.data(), kHeader}, {const_cast<std::byte*>(message.data()), message.size()}}};
    msghdr request{};
    request.msg_iov = parts.data();
    request.msg_iovlen = parts.size();
    ssize_t count;
    do {
      count = ::sendmsg(fd_.get(), &request, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (count < 0 && errno == EINTR);
    if (count < 0 && errno == EPIPE) return std::nullopt;
    if (count < 0 && errno != EAGAIN && errno != EWOULDBLOCK) return lost(errno);
    sent = count < 0 ? 0 : static_cast<size_t>(count);
    if (sent == total) return std::nullopt;
  }
  if (out_.size() - out_begin_ + total > kMaxQueued) {
    return "the peer does not read: " + std::to_string(out_.size() - out_begin_) +
           " bytes of control messages are waiting for it";
  }
  if (sent < kHeader)
    out_.insert(out_.end(), header.begin() + static_cast<ptrdiff_t>(sent), header.end());
  const size_t skip = sent > kHeader ? sent - kHeader : 0;
  out_.insert(out_.end(), message.begin() + static_cast<ptrdiff_t>(skip), message.end());
  if (!std::exchange(want_out_, true)) loop_->modify(fd_.get(), EPOLLIN | EPOLLOUT);
  return std::nullopt;
}

FrameSocket::Failure FrameSocket::flush() {
  const std::lock_guard lock(mutex_);
  while (out_begin_ < out_.size()) {
    const ssize_t count = ::send(fd_.get(), out_.data() + out_begin_, out_.size() - out_begin_,
                                 MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count < 0) {
      if (errno == EINTR) continue;
      if (errno == EPIPE) break;
      if (errno != EAGAIN && errno != EWOULDBLOCK) return lost(errno);
      if (out_begin_ > out_.size() / 2) {
        out_.erase(out_.begin(), out_.begin() + static_cast<ptrdiff_t>(out_begin_));
        out_begin_ = 0;
      }
      return std::nullopt;
    }
    out_begin_ += static_cast<size_t>(count);
  }
  out_ = {};
  out_begin_ = 0;
  if (std::exchange(want_out_, false)) loop_->modify(fd_.get(), EPOLLIN);
  return std::nullopt;
}

FrameSocket::Failure FrameSocket::parse(
    const std::function<bool(std::span<const std::byte>)>& deliver, bool& go_on) {
  while (go_on && in_end_ - in_begin_ >= kLength) {
    const size_t length = load(in_.data() + in_begin_);
    if (length > kMaxMessage) {
      return "the peer sent a control message of " + std::to_string(length) +
             " bytes where at most " + std::to_string(kMaxMessage) +
             " are allowed: it does not speak this protocol";
    }
    if (in_end_ - in_begin_ < kHeader + length) {
      if (in_.size() < kHeader + length) in_.resize(kHeader + length);
      break;
    }
    const std::span<const std::byte> message(in_.data() + in_begin_ + kHeader, length);
    if (load(in_.data() + in_begin_ + kLength) != check_of(message, received_++)) {
      return "control message " + std::to_string(received_) + " of " + std::to_string(length) +
             " bytes was damaged on the way, or does not speak this protocol";
    }
    in_begin_ += kHeader + length;
    go_on = deliver(message);
  }
  std::memmove(in_.data(), in_.data() + in_begin_, in_end_ - in_begin_);
  in_end_ -= in_begin_;
  in_begin_ = 0;
  if (in_end_ == 0 && in_.size() > kReceiveBuffer) {
    in_ = std::vector<std::byte>(kReceiveBuffer);
  }
  return std::nullopt;
}

FrameSocket::Failure FrameSocket::receive(
    const std::function<bool(std::span<const std::byte>)>& deliver) {
  bool go_on = true;
  for (int turn = 0; go_on && turn < kReceivesPerTurn; ++turn) {
    const size_t room = in_.size() - in_end_;
    const ssize_t count = ::recv(fd_.get(), in_.data() + in_end_, room, MSG_DONTWAIT);
    if (count < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return std::nullopt;
      return lost(errno);
    }
    if (count == 0) {
      return in_end_ == 0 ? "the peer closed the connection"
                          : "the peer closed the connection in the middle of a message";
    }
    in_end_ += static_cast<size_t>(count);
    const bool drained = static_cast<size_t>(count) < room;
    if (Failure failure = parse(deliver, go_on)) return failure;
    if (drained) return std::nullopt;
  }
  return std::nullopt;
}

FrameSocket::Failure FrameSocket::drain() {
  in_begin_ = in_end_ = 0;
  for (int turn = 0; turn < kReceivesPerTurn; ++turn) {
    const ssize_t count = ::recv(fd_.get(), in_.data(), in_.size(), MSG_DONTWAIT);
    if (count == 0) return "the peer closed the connection";
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return std::nullopt;
    if (count < 0 && errno != EINTR) return lost(errno);
  }
  return std::nullopt;
}

void FrameSocket::shutdown(int how) { ::shutdown(fd_.get(), how); }

}  // namespace kvxfer
