#ifndef KVXFER_TESTS_LINK_PAIR_H_
#define KVXFER_TESTS_LINK_PAIR_H_

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kvxfer/transport.h"

namespace kvxfer::testing {

using Bytes = std::vector<std::byte>;

inline Bytes to_bytes(const std::string& text) {
  Bytes bytes(text.size());
  std::memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

// Memory that a peer may map.
class Arena {
 public:
  explicit Arena(size_t size, bool sealed = true) : size_(size) {
    fd_ = ::memfd_create("test-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd_ < 0 || ::ftruncate(fd_, static_cast<off_t>(size)) != 0)
      throw std::runtime_error("memfd");
    if (sealed) ::fcntl(fd_, F_ADD_SEALS, F_SEAL_SHRINK);
    data_ =
        static_cast<std::byte*>(::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0));
  }
  ~Arena() {
    ::munmap(data_, size_);
    ::close(fd_);
  }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  std::byte* data() { return data_; }
  size_t size() const { return size_; }
  int duplicate() const { return ::fcntl(fd_, F_DUPFD_CLOEXEC, 0); }

 private:
  size_t size_;
  int fd_ = -1;
  std::byte* data_ = nullptr;
};

// False when `condition` has not come true within `time`, not counting that in which this process
// stood still.
inline bool wait_running(std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
                         std::chrono::seconds time, const std::function<bool()>& condition) {
  constexpr std::chrono::milliseconds kTick(100);
  for (auto left = time / kTick; left > 0; --left) {
    if (changed.wait_for(lock, kTick, condition)) return true;
  }
  return false;
}

// Records what a link says. Behaviour is changed through the hooks, set before start().
class Recorder : public LinkSink {
 public:
  struct Landed {
    Bytes notice;
    bool accepted;
  };
  struct Written {
    uint64_t token;
    bool ok;
  };

  std::function<void(Link&, std::span<const std::byte>)> message_hook;
  std::function<std::byte*(uint64_t offset, uint64_t size, std::span<const std::byte>)>
      incoming_hook;
  std::function<void(std::span<const std::byte>, bool accepted)> landed_hook;
  std::function<void(const std::string&)> closed_hook;

  void on_message(Link& link, std::span<const std::byte> message) override {
    if (message_hook) message_hook(link, message);
    update([&] { messages.emplace_back(message.begin(), message.end()); });
  }
  std::byte* on_incoming(Link&, uint64_t offset, uint64_t size,
                         std::span<const std::byte> notice) override {
    update([&] { ++incoming; });
    return incoming_hook ? incoming_hook(offset, size, notice) : nullptr;
  }
  void on_landed(Link&, std::span<const std::byte> notice, bool accepted) override {
    if (landed_hook) landed_hook(notice, accepted);
    update([&] { landed.push_back({Bytes(notice.begin(), notice.end()), accepted}); });
  }
  void on_written(Link&, uint64_t token, bool ok) override {
    update([&] { written.push_back({token, ok}); });
  }
  void on_closed(Link&, const std::string& reason) override {
    if (closed_hook) closed_hook(reason);
    update([&] { closed.push_back(reason); });
  }

  // False when `condition` has not come true within 30 seconds. It may read the vectors.
  bool wait(const std::function<bool()>& condition) {
    std::unique_lock lock(mutex);
    return wait_running(changed, lock, std::chrono::seconds(30), condition);
  }
  bool wait_closed() {
    return wait([&] { return !closed.empty(); });
  }

  size_t times_closed() {
    const std::lock_guard lock(mutex);
    return closed.size();
  }

  std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  std::vector<Bytes> messages;
  std::vector<Landed> landed;
  std::vector<Written> written;
  std::vector<std::string> closed;
  int incoming = 0;

 private:
  void update(const std::function<void()>& change) {
    const std::lock_guard lock(mutex);
    change();
    changed.notify_all();
  }
};

// A connected pair of TCP sockets over 127.0.0.1 or ::1.
inline std::pair<int, int> tcp_pair(bool ipv6) {
  const int family = ipv6 ? AF_INET6 : AF_INET;
  const int listener = ::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_storage address{};
  socklen_t size;
  if (ipv6) {
    auto& v6 = reinterpret_cast<sockaddr_in6&>(address);
    v6.sin6_family = AF_INET6;
    v6.sin6_addr = in6addr_loopback;
    size = sizeof(v6);
  } else {
    auto& v4 = reinterpret_cast<sockaddr_in&>(address);
    v4.sin_family = AF_INET;
    v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    size = sizeof(v4);
  }
  auto* raw = reinterpret_cast<sockaddr*>(&address);
  const int client = ::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  int server = -1;
  if (::bind(listener, raw, size) == 0 && ::listen(listener, 1) == 0 &&
      ::getsockname(listener, raw, &size) == 0 && ::connect(client, raw, size) == 0) {
    server = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  }
  ::close(listener);
  if (server < 0) throw std::runtime_error("cannot make a TCP pair");
  return {client, server};
}

inline std::pair<int, int> unix_pair() {
  int fds[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) {
    throw std::runtime_error("socketpair");
  }
  return {fds[0], fds[1]};
}

inline bool have_ipv6() {
  try {
    const auto [a, b] = tcp_pair(true);
    ::close(a);
    ::close(b);
    return true;
  } catch (const std::runtime_error&) {
    return false;
  }
}

// Makes both ends of a link: the producer's first. `arena` is what the consumer owns.
using LinkMaker = std::function<std::pair<std::shared_ptr<Link>, std::shared_ptr<Link>>(
    IoThreads& producer, IoThreads& consumer, std::span<std::byte> arena)>;

// Transports that not every build has; each adds itself before main().
inline std::map<std::string, LinkMaker>& further_transports() {
  static std::map<std::string, LinkMaker> makers;
  return makers;
}

inline std::vector<std::string> transports() {
  std::vector<std::string> names{"loopback", "shm", "tcp", "tcp-1"};
  if (have_ipv6()) names.push_back("tcp6");
  for (const auto& [name, maker] : further_transports()) names.push_back(name);
  return names;
}

// What Link::transport() says: "tcp" of "tcp6", "ucx" of "ucx-shm".
inline std::string kind_of(const std::string& name) {
  return name.starts_with("tcp") ? "tcp" : name.substr(0, name.find('-'));
}

// Both ends of a link of the named transport: the consumer has an arena, the producer writes into
// it.
struct LinkPair {
  explicit LinkPair(const std::string& transport, const LoopbackFaults& faults = {},
                    size_t arena_bytes = 8u << 20)
      : arena(arena_bytes) {
    consumer_sink.incoming_hook = [this](uint64_t offset, uint64_t size, auto) -> std::byte* {
      return offset + size <= arena.size() ? arena.data() + offset : nullptr;
    };
    if (transport == "loopback") {
      std::tie(producer, consumer) = make_loopback_pair(producer_threads, consumer_threads, faults);
    } else if (transport == "shm") {
      const auto [p, c] = unix_pair();
      producer = make_shm_link(producer_threads, p, arena.duplicate(), arena.size());
      consumer = make_shm_link(consumer_threads, c, -1, 0);
    } else if (const auto maker = further_transports().find(transport);
               maker != further_transports().end()) {
      std::tie(producer, consumer) =
          maker->second(producer_threads, consumer_threads, {arena.data(), arena.size()});
    } else {
      const bool ipv6 = transport == "tcp6";
      const auto [p, c] = tcp_pair(ipv6);
      std::vector<int> producer_data, consumer_data;
      for (int i = 0; i < (transport == "tcp-1" ? 1 : 3); ++i) {
        const auto [a, b] = tcp_pair(ipv6);
        producer_data.push_back(a);
        consumer_data.push_back(b);
      }
      producer = make_tcp_link(producer_threads, p, producer_data);
      consumer = make_tcp_link(consumer_threads, c, consumer_data);
    }
  }

  ~LinkPair() { close(); }

  void start() {
    producer->start(producer_sink);
    consumer->start(consumer_sink);
    started = true;
  }

  // Ends both links and waits until they have said so.
  void close() {
    if (producer) producer->close("the test is over");
    if (consumer) consumer->close("the test is over");
    producer.reset();
    if (std::exchange(started, false)) {
      producer_sink.wait_closed();
      consumer_sink.wait_closed();
    }
    consumer.reset();
  }

  Arena arena;
  Recorder producer_sink, consumer_sink;
  IoThreads producer_threads{2}, consumer_threads{2};
  std::shared_ptr<Link> producer, consumer;
  bool started = false;
};

}  // namespace kvxfer::testing

#endif  // KVXFER_TESTS_LINK_PAIR_H_
