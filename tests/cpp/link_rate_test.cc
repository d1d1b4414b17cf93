// What links say they carry.

#include <poll.h>

#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include "base/unique_fd.h"
#include "link_pair.h"
#include "transport/tcp/link_rate.h"

namespace kvxfer {
namespace {

// Sends `bytes` from one socket to the other.
void pump(int from, int to, size_t bytes) {
  std::thread reader([&] {
    std::vector<std::byte> buffer(1u << 20);
    for (size_t got = 0; got < bytes;) {
      pollfd ready{to, POLLIN, 0};
      if (::poll(&ready, 1, 10000) <= 0) return;
      const ssize_t count = ::recv(to, buffer.data(), buffer.size(), MSG_DONTWAIT);
      if (count > 0) got += static_cast<size_t>(count);
    }
  });
  const std::vector<std::byte> data(1u << 20);
  for (size_t sent = 0; sent < bytes;) {
    pollfd ready{from, POLLOUT, 0};
    if (::poll(&ready, 1, 10000) <= 0) break;
    const size_t left = std::min(data.size(), bytes - sent);
    const ssize_t count = ::send(from, data.data(), left, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count > 0) sent += static_cast<size_t>(count);
  }
  reader.join();
}

TEST_CASE("link rate: tcp says nothing before enough was sent, then what it saw") {
  const auto [a, b] = testing::tcp_pair(false);
  const UniqueFd from(a), to(b);
  LinkRate rate({from.get()});
  CHECK_FALSE(rate.read());  // the loopback interface has no speed
  pump(from.get(), to.get(), 4096);
  CHECK_FALSE(rate.read());
  // The kernel counts in ticks: it takes some to be sure.
  std::optional<double> found;
  for (int i = 0; i < 100 && !found; ++i) {
    pump(from.get(), to.get(), 64u << 20);
    found = rate.read();
  }
  REQUIRE(found);
  CHECK(*found > 1e7);
  CHECK(*found < 1e12);
  CHECK(rate.read() == found);  // nothing new was learnt
}

TEST_CASE("link rate: sockets that are none are no harm") {
  CHECK_FALSE(LinkRate({}).read());
  CHECK_FALSE(LinkRate({-1}).read());
  CHECK_FALSE(interface_rate(-1));
}

TEST_CASE("link rate: a paced loopback link keeps to its rate, others have none") {
  IoThreads threads(1);
  CHECK_FALSE(make_loopback_pair(threads, threads).first->rate());

  LoopbackFaults faults;
  faults.bytes_per_second = 1000000;
  auto [ours, theirs] = make_loopback_pair(threads, threads, faults);
  CHECK(ours->rate() == 1e6);
  testing::Recorder reader, writer;
  std::vector<std::byte> memory(20000);
  reader.incoming_hook = [&](uint64_t, uint64_t, std::span<const std::byte>) {
    return memory.data();
  };
  ours->start(writer);
  theirs->start(reader);
  const auto begin = std::chrono::steady_clock::now();
  for (uint64_t i = 0; i < 5; ++i) ours->write(memory, 0, testing::to_bytes("x"), i);
  CHECK(reader.wait([&] { return reader.landed.size() == 5; }));
  CHECK(std::chrono::steady_clock::now() - begin >= std::chrono::milliseconds(100));
  ours->close("done");
  CHECK(reader.wait_closed());
  CHECK(writer.wait_closed());
}

}  // namespace
}  // namespace kvxfer
