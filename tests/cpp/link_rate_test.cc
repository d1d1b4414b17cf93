// What links say they carry.

#include <poll.h>

#include <functional>
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

// The rate that is found when each stream sends so many bytes in each millisecond.
double measured(size_t streams, uint32_t seconds, uint64_t look_ms,
                const std::function<uint64_t(size_t stream, uint64_t ms)>& bytes_in) {
  RateMeter meter(streams);
  std::vector<StreamCount> counts(streams);
  for (uint64_t ms = 0; ms < seconds * 1000; ++ms) {
    for (size_t i = 0; i < streams; ++i) {
      const uint64_t bytes = bytes_in(i, ms);
      counts[i].acked += bytes;
      if (bytes > 0) counts[i].busy_us += 1000;
    }
    if ((ms + 1) % look_ms == 0) meter.add(look_ms * 1000, counts);
  }
  return meter.rate().value_or(0);
}

TEST_CASE("link rate: streams that take turns and streams side by side make the same rate") {
  constexpr uint64_t kAMilli = 1000000;  // 1e9 bytes a second
  const auto alone = [](size_t, uint64_t) { return kAMilli; };
  CHECK(measured(1, 1, 10, alone) == doctest::Approx(1e9));
  CHECK(measured(4, 1, 10, [](size_t, uint64_t) { return kAMilli / 4; }) == doctest::Approx(1e9));
  for (const uint64_t turn : {1u, 3u, 10u, 25u}) {
    CAPTURE(turn);
    CHECK(measured(4, 1, 10, [&](size_t i, uint64_t ms) {
            return ms / turn % 4 == i ? kAMilli : 0;
          }) == doctest::Approx(1e9));
  }
  // What lies between fetches does not count.
  CHECK(measured(2, 2, 10, [](size_t, uint64_t ms) {
          return ms / 100 % 2 == 0 ? kAMilli / 2 : 0;
        }) == doctest::Approx(1e9));
}

TEST_CASE("link rate: after a pause it is between what turns and side by side would be") {
  RateMeter one(1), two(2);
  one.add(1000000, std::vector<StreamCount>{{50u << 20, 50000}});
  two.add(1000000, std::vector<StreamCount>{{25u << 20, 50000}, {25u << 20, 50000}});
  const double rate = (50u << 20) / 0.05;
  CHECK(one.rate() == doctest::Approx(rate));
  CHECK(*two.rate() > rate / 2);
  CHECK(*two.rate() < rate);
}

TEST_CASE("link rate: little says nothing, and what changes is followed") {
  RateMeter meter(1);
  meter.add(1000000, std::vector<StreamCount>{{1u << 20, 19000}});
  CHECK_FALSE(meter.rate());
  meter.add(1000, std::vector<StreamCount>{{2u << 20, 20000}});
  CHECK(meter.rate() == doctest::Approx((2u << 20) * 50.0));
  meter.add(1000000, std::vector<StreamCount>{{(2u << 20) + 1000, 50000}});  // too few bytes
  CHECK(meter.rate() == doctest::Approx((2u << 20) * 50.0));
  const double before = *meter.rate();
  meter.add(1000000, std::vector<StreamCount>{{1u << 30, 1050000}});
  CHECK(*meter.rate() > before);
  CHECK(*meter.rate() < 1.1e9);
  const double after = *meter.rate();
  meter.add(1000000, std::vector<StreamCount>{{}});  // the kernel had no answer
  meter.add(1000000, std::vector<StreamCount>{{1u << 30, 1050000}});
  CHECK(meter.rate() == after);
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
