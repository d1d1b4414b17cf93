#ifndef KVXFER_TRANSPORT_COMMON_FRAME_SOCKET_H_
#define KVXFER_TRANSPORT_COMMON_FRAME_SOCKET_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/event_loop.h"
#include "base/unique_fd.h"

namespace kvxfer {

// Messages over a connected stream socket: a length and a check, both 32 bits and little-endian,
// then as many bytes. The check is a CRC-32 of the message that starts with its number in this
// direction, so a message that was changed, lost or repeated on the way is found: a bit that TCP
// lets through would put right bytes into wrong places, where no digest of a chunk looks. Failures
// are returned as text for people; after the first one the socket is of no more use.
class FrameSocket {
 public:
  using Failure = std::optional<std::string>;

  FrameSocket(std::shared_ptr<EventLoop> loop, UniqueFd fd);
  ~FrameSocket();  // takes the descriptor off the loop and closes it

  FrameSocket(const FrameSocket&) = delete;
  FrameSocket& operator=(const FrameSocket&) = delete;

  int fd() const { return fd_.get(); }

  // Has `handler` called on the loop when there is something to receive() or flush().
  void watch(EventLoop::Handler handler);
  // On the loop's thread only.
  void unwatch() {
    loop_->remove(fd_.get());
    const std::lock_guard lock(mutex_);
    want_out_ = false;
  }

  // Sends at once what the socket takes, from the calling thread, and queues the rest. Thread-safe.
  // A peer that has closed is no failure here: receive() finds that out, behind the last messages
  // that the peer sent.
  Failure send(std::span<const std::byte> message);
  Failure flush();

  // Receives what is there, within reason, and hands whole messages to `deliver` until that answers
  // false. On the loop's thread only.
  Failure receive(const std::function<bool(std::span<const std::byte>)>& deliver);

  // Receives and throws away; fails when the peer's end is reached. On the loop's thread only.
  Failure drain();

  void shutdown(int how);  // SHUT_WR, SHUT_RDWR

 private:
  Failure parse(const std::function<bool(std::span<const std::byte>)>& deliver, bool& go_on);

  const std::shared_ptr<EventLoop> loop_;
  const UniqueFd fd_;

  std::mutex mutex_;
  std::vector<std::byte> out_;  // guarded by mutex_; bytes from out_begin_ on wait to be sent
  size_t out_begin_ = 0;        // guarded by mutex_
  uint32_t sent_ = 0;           // guarded by mutex_; messages
  bool want_out_ = false;       // guarded by mutex_; EPOLLOUT is asked for

  std::vector<std::byte> in_;  // [in_begin_, in_end_) is received and not yet delivered
  size_t in_begin_ = 0;
  size_t in_end_ = 0;
  uint32_t received_ = 0;  // messages
};

}  // namespace kvxfer

#endif  // KVXFER_TRANSPORT_COMMON_FRAME_SOCKET_H_
