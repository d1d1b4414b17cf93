#include <sys/epoll.h>
#include <sys/socket.h>

#include <utility>

#include "base/unique_fd.h"
#include "kvxfer/status.h"
#include "transport/common/frame_socket.h"
#include "transport/common/link_base.h"
#include "transport/common/socket.h"
#include "transport/shm/mapped_arena.h"

namespace kvxfer {
namespace {

// Two processes of one host. The producer's link maps the consumer's arena; the consumer's link has
// only the control socket.
//
// The fence: the producer's socket stays open until its link is destroyed, which happens after the
// last thread that writes through mapped_arena() has dropped its reference, or when the process
// dies. So the end of the stream, as the consumer sees it, means that nobody writes any more, and
// only then does the consumer's on_closed() come.
class ShmLink final : public LinkBase {
 public:
  // Consumer.
  ShmLink(const std::shared_ptr<EventLoop>& control, UniqueFd socket)
      : LinkBase(control, 1), socket_(control, std::move(socket)) {}
  // Producer.
  ShmLink(const std::shared_ptr<EventLoop>& control, UniqueFd socket, int memfd, uint64_t bytes)
      : LinkBase(control, 1), socket_(control, std::move(socket)), arena_(memfd, bytes) {}

  const char* transport() const override { return "shm"; }
  bool one_sided() const override { return arena_.bytes().empty(); }
  std::span<std::byte> mapped_arena() const override { return arena_.bytes(); }
  bool crosses_wire() const override { return false; }

  void send(std::span<const std::byte> message) override {
    if (closing()) return;
    if (const auto failure = socket_.send(message)) fail(*failure);
  }

  void write(std::span<const std::byte>, uint64_t, std::span<const std::byte>,
             uint64_t token) override {
    sink().on_written(*this, token, false);
  }

  std::string describe() const override {
    if (one_sided()) return "shm: the peer writes into this arena";
    return "shm: the peer's arena of " + std::to_string(arena_.bytes().size() >> 20) +
           " MiB is mapped";
  }

 protected:
  void begin() override {
    socket_.watch([weak = weak<ShmLink>()](uint32_t events) {
      if (const auto self = weak.lock()) self->on_ready(events);
    });
    control().post([self = shared_from_this(), this] {
      watched_ = true;
      if (closing()) hold();
    });
  }

  void shut() override {
    if (one_sided()) {
      // The producer takes this as the end, lets go of the arena and closes; on_ready() waits for
      // it.
      socket_.shutdown(SHUT_WR);
      control().post([self = shared_from_this(), this] { hold(); });
    } else {
      control().post([self = shared_from_this(), this] { finish(); });
    }
  }

 private:
  // Keeps the link alive until the producer's end comes, or the loop stops. On the control loop.
  void hold() {
    if (!watched_ || finished_ || std::exchange(held_, true)) return;
    socket_.unwatch();  // and no longer for room to write, which a closing link does not use
    socket_.watch([self = shared_from_this(), this](uint32_t events) { on_ready(events); });
  }

  void on_ready(uint32_t events) {
    FrameSocket::Failure failure;
    if (!closing() && (events & EPOLLOUT)) failure = socket_.flush();
    if (failure) fail(*failure);
    if (!closing()) {
      failure = socket_.receive([this](std::span<const std::byte> message) {
        sink().on_message(*this, message);
        return !closing();
      });
      if (failure) fail(*failure);
    }
    if (!closing()) return;
    if (!one_sided() || socket_.drain()) finish();
  }

  // On the control loop.
  void finish() {
    if (std::exchange(finished_, true)) return;
    socket_.unwatch();
    leave();
  }

  FrameSocket socket_;
  MappedArena arena_;  // behind the socket, so that it is unmapped before that is closed

  // The control loop's.
  bool watched_ = false;
  bool held_ = false;
  bool finished_ = false;
};

}  // namespace

std::shared_ptr<Link> make_shm_link(IoThreads& threads, int control_fd, int arena_fd,
                                    uint64_t arena_bytes) {
  UniqueFd socket(control_fd);
  const UniqueFd memfd(arena_fd);
  prepare_stream_socket(socket.get());
  if (!memfd) return std::make_shared<ShmLink>(threads.control(), std::move(socket));
  return std::make_shared<ShmLink>(threads.control(), std::move(socket), memfd.get(), arena_bytes);
}

}  // namespace kvxfer
