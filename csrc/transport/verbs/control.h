#ifndef KVXFER_TRANSPORT_VERBS_CONTROL_H_
#define KVXFER_TRANSPORT_VERBS_CONTROL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "transport/common/frame_socket.h"
#include "transport/verbs/address.h"

namespace kvxfer::ibv {

// What the two ends of a link say to each other about one path. The writer closes and opens queue
// pairs, the reader answers.
struct PathMessage {
  enum Kind : uint8_t {
    kClose = 1,   // writer: my queue pair is gone; how many stripes have arrived on it?
    kLanded = 2,  // reader: so is mine, and `landed` have; none will any more
    kLost = 3,    // reader: my queue pair is gone, for `reason`
    kOpen = 4,    // writer: here is a new one, `qp`
    kOpened = 5,  // reader: mine is connected to it
    kRefused = 6  // reader: there is none, for `reason`
  };
  Kind kind = kClose;
  uint16_t path = 0;
  uint32_t epoch = 0;  // counts the queue pairs of a path
  uint64_t landed = 0;
  QpAddress qp;
  std::string reason;

  std::vector<std::byte> encode() const;
  static PathMessage decode(std::span<const std::byte> bytes);  // throws Error(kProtocol)
};

// The control socket, which carries the messages of the link's owner and those about paths. One
// byte before each tells them apart.
class ControlSocket {
 public:
  using Failure = FrameSocket::Failure;

  ControlSocket(std::shared_ptr<EventLoop> loop, UniqueFd fd)
      : socket_(std::move(loop), std::move(fd)) {}

  FrameSocket& socket() { return socket_; }

  // Thread-safe.
  Failure send(std::span<const std::byte> message);
  Failure send(const PathMessage& message);

  // Receives what is there. `deliver` gets the owner's messages, `about_path` the others; either
  // answers whether to go on. Throws Error(kProtocol). On the loop's thread only.
  Failure receive(const std::function<bool(std::span<const std::byte>)>& deliver,
                  const std::function<bool(const PathMessage&)>& about_path);

 private:
  FrameSocket socket_;
  std::mutex mutex_;  // keeps the two parts of a message that is too long together
  std::vector<std::byte> first_part_;
};

}  // namespace kvxfer::ibv

#endif  // KVXFER_TRANSPORT_VERBS_CONTROL_H_
