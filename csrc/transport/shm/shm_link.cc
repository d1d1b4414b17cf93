#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <exception>
#include <new>
#include <string>
#include <utility>

#include "base/unique_fd.h"
#include "kvxfer/status.h"
#include "transport/common/frame_socket.h"
#include "transport/common/link_base.h"
#include "transport/common/socket.h"
#include "transport/shm/mapped_arena.h"
#include "wire/messages.h"

namespace kvxfer {
namespace {

// Headers older than Linux 5.3 do not name it. The number is that of x86-64 and arm64.
constexpr long kPidfdOpen = 434;

// The process at the other end of a socket.
struct PeerProcess {
  std::string problem;  // why it may not share memory of GPUs with us
  UniqueFd exit;        // readable when it has ended
};

PeerProcess peer_process(int socket, bool watch) {
  ucred who{};
  socklen_t size = sizeof(who);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &who, &size) != 0) {
    return {"who the peer is cannot be found: " + error_text(errno), {}};
  }
  if (who.pid == 0) return {"the peer's process is in another PID namespace", {}};
  if (who.pid == ::getpid()) return {"both agents are in one process", {}};
  if (who.uid != ::geteuid()) return {"the peer is another user's process", {}};
  if (!watch) return {};
  UniqueFd exit(static_cast<int>(::syscall(kPidfdOpen, who.pid, 0)));  // closed by exec
  if (!exit) return {"the peer's process cannot be watched: " + error_text(errno), {}};
  return {"", std::move(exit)};
}

// Two processes of one host. The producer's link maps the consumer's arena; the consumer's link has
// only the control socket.
//
// The fence: the producer's socket stays open until its link is destroyed, which happens after the
// last thread that writes through mapped_arena() has dropped its reference, or when the process
// dies. So the end of the stream, as the consumer sees it, means that nobody writes any more, and
// only then does the consumer's on_closed() come.
//
// With memory of GPUs that is not enough: a process that dies closes its sockets perhaps before the
// descriptors by which its driver learns that the GPU has to stop. All of them are closed when the
// process counts as ended, so that is waited for, unless the peer has said GPU_CLOSED.
class ShmLink final : public LinkBase {
 public:
  // Consumer.
  ShmLink(const std::shared_ptr<EventLoop>& control, UniqueFd socket)
      : LinkBase(control, 1),
        socket_(control, std::move(socket)),
        process_(peer_process(socket_.fd(), /*watch=*/true)) {}
  // Producer.
  ShmLink(const std::shared_ptr<EventLoop>& control, UniqueFd socket, int memfd, uint64_t bytes)
      : LinkBase(control, 1),
        socket_(control, std::move(socket)),
        process_(peer_process(socket_.fd(), /*watch=*/false)),
        arena_(memfd, bytes) {}

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

  std::string gpu_ipc_problem() const override { return process_.problem; }
  void expose_gpus() override { exposed_ = true; }
  void let_go_of_gpus() override {
    // Also while the link is closing. What does not fit into the socket is not said.
    try {
      static_cast<void>(socket_.send(wire::encode_gpu_closed()));
    } catch (const std::bad_alloc&) {
    }
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
    if (!watched_ || finished_ || ended_ || std::exchange(held_, true)) return;
    socket_.unwatch();  // and no longer for room to write, which a closing link does not use
    socket_.watch([self = shared_from_this(), this](uint32_t events) { on_ready(events); });
  }

  void on_ready(uint32_t events) {
    FrameSocket::Failure failure;
    if (!closing() && (events & EPOLLOUT)) failure = socket_.flush();
    if (failure) fail(*failure);
    if (!closing()) {
      failure =
          socket_.receive([this](std::span<const std::byte> message) { return take(message); });
      if (failure) fail(*failure);
    }
    if (!closing()) return;
    if (!one_sided()) return finish();
    // Only the end of the stream ends it: not a damaged message.
    if (!deaf_ && socket_.receive([this](auto message) { return take(message); })) deaf_ = true;
    if (deaf_ && socket_.drain()) peer_let_go();
  }

  // Whether there may be more of interest.
  bool take(std::span<const std::byte> message) {
    if (one_sided() && process_.problem.empty() && message.size() == 1 &&
        message[0] == static_cast<std::byte>(wire::MessageType::kGpuClosed)) {
      closed_gpus_ = true;
    } else if (!closing()) {
      sink().on_message(*this, message);
    }
    return !closing() || one_sided();
  }

  // The producer's end has come.
  void peer_let_go() {
    if (std::exchange(ended_, true)) return;
    if (!exposed_ || closed_gpus_) return finish();
    socket_.unwatch();
    try {
      control().add(process_.exit.get(), EPOLLIN, [self = shared_from_this(), this](uint32_t) {
        control().remove(process_.exit.get());
        finish();
      });
    } catch (const std::exception&) {
      // Then nobody knows, and what the peer had is never used again.
    }
    sink().on_lost(*this, "its connection has ended, and its process perhaps not yet");
  }

  // On the control loop.
  void finish() {
    if (std::exchange(finished_, true)) return;
    socket_.unwatch();
    leave();
  }

  FrameSocket socket_;
  const PeerProcess process_;
  std::atomic<bool> exposed_ = false;
  MappedArena arena_;  // behind the socket, so that it is unmapped before that is closed

  // The control loop's.
  bool watched_ = false;
  bool held_ = false;
  bool finished_ = false;
  bool deaf_ = false;  // what the peer says is over, or makes no sense
  bool closed_gpus_ = false;
  bool ended_ = false;  // the stream
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
