// What is UCX's own: tests of all transports run over it through ucx_link_pair.cc.

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <optional>
#include <thread>

#include "kvxfer/status.h"
#include "kvxfer/ucx.h"
#include "link_pair.h"

namespace kvxfer::testing {
namespace {

std::vector<std::string> ucx_transports() {
  std::vector<std::string> names;
  for (const auto& [name, maker] : further_transports()) {
    if (kind_of(name) == "ucx") names.push_back(name);
  }
  if (names.empty()) MESSAGE("skipped: there is no UCX here (KVXFER_UCX_PATH names one)");
  return names;
}

// Both endpoints, over sockets, not connected.
struct Ends {
  explicit Ends(size_t arena_bytes = 1u << 20) : arena(arena_bytes) {
    ::setenv("UCX_TLS", "tcp", 1);
    producer_fabric.emplace(producer_threads, UcxOptions{});
    consumer_fabric.emplace(consumer_threads, UcxOptions{});
    producer.emplace(*producer_fabric, nullptr);
    consumer.emplace(*consumer_fabric,
                     consumer_fabric->register_memory({arena.data(), arena.size()}));
  }

  Arena arena;
  IoThreads producer_threads{1}, consumer_threads{1};
  std::optional<UcxFabric> producer_fabric, consumer_fabric;
  std::optional<UcxEndpoint> producer, consumer;
};

std::string failure_of(UcxEndpoint& end, std::span<const std::byte> remote, double timeout = 10) {
  const auto [ours, theirs] = tcp_pair(false);
  std::string text;
  try {
    end.connect(ours, remote, timeout);
  } catch (const Error& error) {
    text = error.what();
  }
  ::close(theirs);
  return text;
}

TEST_CASE("ucx: a link names the lanes that UCX has chosen, and its version") {
  for (const std::string& name : ucx_transports()) {
    LinkPair pair(name);
    for (const auto& link : {pair.producer, pair.consumer}) {
      const std::string text = link->describe();
      CAPTURE(text);
      const bool sockets = text.find(" over tcp/") != text.npos;
      const bool memory =
          text.find("posix/memory") != text.npos || text.find("sysv/memory") != text.npos;
      CHECK(sockets == (name == "ucx-tcp"));
      CHECK(memory == (name == "ucx-shm"));
      CHECK(text.starts_with("ucx 1."));
      CHECK_FALSE(link->rate());
    }
  }
}

TEST_CASE("ucx: nothing is called, and nothing lands, after on_closed while the writer goes on") {
  for (const std::string& name : ucx_transports()) {
    for (int round = 0; round < 6; ++round) {
      CAPTURE(name);
      LinkPair pair(name);
      constexpr std::byte kPoison{0x5a};
      std::atomic<bool> closed{false};
      std::atomic<int> late{0};
      pair.consumer_sink.landed_hook = [&](auto, bool) { late += closed; };
      pair.consumer_sink.closed_hook = [&](const std::string&) {
        std::fill_n(pair.arena.data(), pair.arena.size(), kPoison);
        closed = true;
      };
      pair.start();
      const Bytes source(1u << 20, std::byte{1});
      std::atomic<uint64_t> tokens{0};
      std::thread writer([&, link = pair.producer] {
        while (!closed || tokens < 20) {
          const uint64_t token = tokens++;
          link->write(source, token % 8 * source.size(), {}, token);
          Recorder& sink = pair.producer_sink;
          CHECK(sink.wait([&] { return sink.written.size() + 16 > token; }));
        }
      });
      const size_t some = static_cast<size_t>(round) * 4;
      CHECK(pair.consumer_sink.wait([&] { return pair.consumer_sink.landed.size() >= some; }));
      (round % 2 ? pair.producer : pair.consumer)->close("in the middle");
      CHECK(pair.consumer_sink.wait_closed());
      writer.join();
      CHECK(pair.producer_sink.wait_closed());
      CHECK(pair.producer_sink.wait([&] { return pair.producer_sink.written.size() == tokens; }));
      CHECK(late == 0);
      CHECK(std::all_of(pair.arena.data(), pair.arena.data() + pair.arena.size(),
                        [&](std::byte byte) { return byte == kPoison; }));
    }
  }
}

TEST_CASE("ucx: writes over the limits end the link, with a reason") {
  for (const std::string& name : ucx_transports()) {
    LinkPair pair(name, {}, 1u << 20);
    pair.start();
    const Bytes source(100);
    pair.producer->write(source, pair.arena.size() - 99, {}, 7);
    CHECK(pair.producer_sink.wait_closed());
    CHECK(pair.producer_sink.closed[0].find("over the end") != std::string::npos);
    REQUIRE(pair.producer_sink.written.size() == 1);
    CHECK_FALSE(pair.producer_sink.written[0].ok);
  }
}

TEST_CASE("ucx: transports past our fence are never used") {
  if (ucx_transports().empty()) return;
  for (const char* given : {"tcp,cma", "all"}) {
    ::setenv("UCX_TLS", given, 1);
    const UcxInfo info = describe_ucx({});
    CHECK_FALSE(info.resources.empty());
    for (const std::string& resource : info.resources) {
      CAPTURE(resource);
      CHECK_FALSE(resource.starts_with("cma"));
      CHECK(resource.find('/') != std::string::npos);
    }
  }
  ::setenv("UCX_TLS", "cma", 1);
  CHECK_THROWS_AS(describe_ucx({}), Error);
  ::setenv("UCX_TLS", "no_such_transport", 1);
  CHECK_THROWS_AS(describe_ucx({}), Error);
  ::setenv("UCX_TLS", "tcp", 1);
  CHECK_FALSE(describe_ucx({}).rdma);
}

TEST_CASE("ucx: addresses that make no sense are refused") {
  if (ucx_transports().empty()) return;
  Ends ends;
  const Bytes address = ends.consumer->address();
  for (size_t size = 0; size < address.size(); ++size) {
    if (size > 24 && size + 24 < address.size()) continue;  // inside of what is UCX's
    CHECK_FALSE(failure_of(*ends.producer, std::span(address).first(size)).empty());
  }
  Bytes other = address;
  other[0] = std::byte{9};
  CHECK(failure_of(*ends.producer, other).find("version 9") != std::string::npos);
  other = address;
  other.push_back(std::byte{0});
  CHECK(failure_of(*ends.producer, other).find("too many") != std::string::npos);
  // An arena that reaches over the end of all addresses.
  other = address;
  std::fill_n(other.begin() + 4, 8, std::byte{0xff});
  CHECK(failure_of(*ends.producer, other).find("makes no sense") != std::string::npos);
  // Four thousand million lanes.
  const Bytes many(4, std::byte{0xff});
  CHECK_FALSE(failure_of(*ends.consumer, many).empty());
}

TEST_CASE("ucx: a consumer that is gone is not waited for beyond the timeout") {
  if (ucx_transports().empty()) return;
  Ends ends;
  const Bytes address = ends.consumer->address();
  ends.consumer.reset();
  const auto start = std::chrono::steady_clock::now();
  const std::string problem = failure_of(*ends.producer, address, 5);
  CHECK(problem.starts_with("UCX: "));
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(30));
  CHECK(failure_of(*ends.producer, address).find("connected already") != std::string::npos);
}

}  // namespace
}  // namespace kvxfer::testing
