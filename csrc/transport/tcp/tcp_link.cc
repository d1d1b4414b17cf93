#include <sys/epoll.h>
#include <sys/socket.h>

#include <atomic>
#include <optional>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "kvxfer/status.h"
#include "transport/common/frame_socket.h"
#include "transport/common/link_base.h"
#include "transport/common/socket.h"
#include "transport/tcp/data_stream.h"
#include "transport/tcp/link_rate.h"

namespace kvxfer {
namespace {

// Control messages have a socket and a loop of their own, so they never wait behind data. Each data
// stream is received by one bulk loop, straight into the arena.
class TcpLink final : public LinkBase {
 public:
  TcpLink(IoThreads& threads, UniqueFd control_socket, std::vector<UniqueFd> data)
      : LinkBase(threads.control(), 1 + data.size()),
        description_("tcp " + local_address(control_socket.get()) + " - " +
                     peer_address(control_socket.get()) + ", " + std::to_string(data.size()) +
                     " data stream" + (data.size() == 1 ? "" : "s")),
        socket_(threads.control(), std::move(control_socket)),
        rate_(descriptors(data)) {
    for (size_t i = 0; i < data.size(); ++i) {
      streams_.push_back(std::make_unique<DataStream>(threads.bulk(i), std::move(data[i])));
    }
  }

  const char* transport() const override { return "tcp"; }
  std::string describe() const override { return description_; }
  std::optional<double> rate() const override { return rate_.read(); }

  void send(std::span<const std::byte> message) override {
    if (closing()) return;
    if (const auto failure = socket_.send(message)) fail(*failure);
  }

  void write(std::span<const std::byte> source, uint64_t offset, std::span<const std::byte> notice,
             uint64_t token) override {
    if (source.size() > kMaxWrite || notice.size() > kMaxNotice) {
      fail("a write of " + std::to_string(source.size()) + " bytes with a notice of " +
           std::to_string(notice.size()) + " is over the limits");
    }
    if (!enter()) {
      sink().on_written(*this, token, false);
      return;
    }
    rate_.note();
    std::vector<DataStream::Written> done;
    if (auto failure = choose_stream().write(source, offset, notice, token, done)) {
      lose(std::move(*failure));
    }
    report(done);
    leave();
  }

 protected:
  void begin() override {
    socket_.watch([weak = weak<TcpLink>()](uint32_t events) {
      if (const auto self = weak.lock()) self->on_control(events);
    });
    for (const auto& stream : streams_) {
      stream->watch([weak = weak<TcpLink>(), &stream = *stream](uint32_t events) {
        if (const auto self = weak.lock()) self->on_data(stream, events);
      });
    }
  }

  void shut() override {
    socket_.shutdown(SHUT_RDWR);
    control().post([self = shared_from_this(), this] {
      socket_.unwatch();
      leave();
    });
    for (const auto& stream : streams_) {
      stream->shutdown();
      stream->loop().post([self = shared_from_this(), this, &stream = *stream] {
        stream.unwatch();
        std::vector<DataStream::Written> done;
        stream.abandon(done);
        report(done);
        leave();
      });
    }
  }

 private:
  // Hands what one stream receives to the sink.
  class Arrivals final : public DataStream::Receiver {
   public:
    explicit Arrivals(TcpLink& link) : link_(link) {}
    std::byte* incoming(uint64_t offset, uint64_t size,
                        std::span<const std::byte> notice) override {
      return link_.sink().on_incoming(link_, offset, size, notice);
    }
    bool landed(std::span<const std::byte> notice, bool accepted) override {
      link_.sink().on_landed(link_, notice, accepted);
      return !link_.closing();
    }

   private:
    TcpLink& link_;
  };

  static std::vector<int> descriptors(const std::vector<UniqueFd>& sockets) {
    std::vector<int> all;
    for (const UniqueFd& socket : sockets) all.push_back(socket.get());
    return all;
  }

  DataStream& choose_stream() {
    size_t best = next_.fetch_add(1, std::memory_order_relaxed) % streams_.size();
    for (size_t i = 0; i < streams_.size(); ++i) {
      if (streams_[i]->queued() < streams_[best]->queued()) best = i;
    }
    return *streams_[best];
  }

  void on_control(uint32_t events) {
    if (closing()) {
      socket_.unwatch();
      return;
    }
    FrameSocket::Failure failure;
    if (events & EPOLLOUT) failure = socket_.flush();
    if (!failure) failure = receive_control();
    if (failure) fail(*failure);
  }

  FrameSocket::Failure receive_control() {
    return socket_.receive([this](std::span<const std::byte> message) {
      sink().on_message(*this, message);
      return !closing();
    });
  }

  void on_data(DataStream& stream, uint32_t events) {
    if (closing()) {
      stream.unwatch();
      return;
    }
    DataStream::Failure failure;
    if (events & EPOLLOUT) {
      rate_.note();
      std::vector<DataStream::Written> done;
      failure = stream.flush(done);
      report(done);
    }
    if (!failure && (events & ~EPOLLOUT)) {
      Arrivals arrivals(*this);
      failure = stream.receive(arrivals);
    }
    if (failure) {
      stream.unwatch();
      lose(std::move(*failure));
    }
  }

  // A data stream has failed. What the peer said on the control socket before comes first: it may
  // say why.
  void lose(std::string reason) {
    control().post([self = shared_from_this(), this, reason = std::move(reason)] {
      if (!closing()) {
        if (const auto failure = receive_control()) fail(*failure);
      }
      fail(reason);
    });
  }

  void report(const std::vector<DataStream::Written>& done) {
    for (const auto& [token, ok] : done) sink().on_written(*this, token, ok);
  }

  const std::string description_;
  FrameSocket socket_;
  std::vector<std::unique_ptr<DataStream>> streams_;
  mutable LinkRate rate_;  // of the streams' sockets
  std::atomic<size_t> next_{0};
};

}  // namespace

std::shared_ptr<Link> make_tcp_link(IoThreads& threads, int control_fd, std::vector<int> data_fds) {
  UniqueFd control(control_fd);
  std::vector<UniqueFd> data;
  data.reserve(data_fds.size());
  for (const int fd : data_fds) data.emplace_back(fd);

  if (data.empty()) throw Error(StatusCode::kInvalid, "a tcp link needs at least one data socket");
  prepare_tcp_socket(control.get());
  for (const UniqueFd& fd : data) prepare_tcp_socket(fd.get());
  return std::make_shared<TcpLink>(threads, std::move(control), std::move(data));
}

}  // namespace kvxfer
