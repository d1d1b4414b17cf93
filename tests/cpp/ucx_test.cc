// What is UCX's own: tests of all transports run over it through ucx_link_pair.cc.

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <optional>
#include <thread>

#include "base/byte_io.h"
#include "kvxfer/status.h"
#include "kvxfer/ucx.h"
#include "link_pair.h"
#include "transport/ucx/worker.h"

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

// As ucx_link_pair.cc has it.
bool over_rdma() { return std::getenv("KVXFER_TEST_VERBS") != nullptr; }

// Both endpoints, not connected.
struct Ends {
  explicit Ends(size_t arena_bytes = 1u << 20) : arena(arena_bytes) {
    ::setenv("UCX_TLS", over_rdma() ? "rc_v" : "tcp", 1);
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

// The end that `end` has connected, and the other end of its control connection.
struct Connected {
  Connected(UcxEndpoint& end, std::span<const std::byte> remote) {
    const auto [ours, theirs] = tcp_pair(false);
    control = theirs;
    link = end.connect(ours, remote, 10);
  }
  ~Connected() {
    link->close("the test is over");
    sink.wait_closed();
    ::close(control);
  }

  Recorder sink;
  std::shared_ptr<Link> link;
  int control;
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

TEST_CASE("ucx: a link names the lanes that UCX has chosen, what it does, and its version") {
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
      CHECK((text.find(" over rc_verbs/") != text.npos) == (name == "ucx-rc"));
      CHECK((text.find(" over ud_verbs/") != text.npos) == (name == "ucx-ud"));
      CHECK(text.starts_with("ucx 1."));
      const char* how = name == "ucx-rc" ? ", by put; control" : ", in messages; control";
      CHECK(text.find(how) != text.npos);
      CHECK(link->rate().has_value() == (over_rdma() && link == pair.producer));
    }
  }
}

TEST_CASE("ucx: nothing is called, and nothing lands, after on_closed while the writer goes on") {
  for (const std::string& name : ucx_transports()) {
    for (int round = 0; round < (over_rdma() ? 2 : 6); ++round) {
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
      const Bytes source(over_rdma() ? 64u << 10 : 1u << 20, std::byte{1});  // soft-RoCE is slow
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
  if (ucx_transports().empty() || over_rdma()) return;
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
  std::fill_n(other.begin() + 20, 8, std::byte{0xff});
  CHECK(failure_of(*ends.producer, other).find("makes no sense") != std::string::npos);
  // Four thousand million lanes.
  const Bytes many(8, std::byte{0xff});
  CHECK_FALSE(failure_of(*ends.consumer, many).empty());
  ByteWriter coloured;
  coloured.put(uint32_t{0});
  coloured.put(uint32_t{1});
  coloured.put_string("\x1b[31mtcp/lo");
  CHECK(failure_of(*ends.consumer, coloured.take()).find("make no sense") != std::string::npos);
  ByteWriter puts;  // into memory whose key nobody has told
  puts.put(uint32_t{1});
  puts.put(uint32_t{0});
  if (over_rdma()) return;  // there it was told
  CHECK(failure_of(*ends.consumer, puts.take()).find("no key") != std::string::npos);
}

// UCX takes no lengths, and would read beyond the end of what was cut short.
TEST_CASE("ucx: what UCX parses is followed by zeros") {
  ucp::ReaderAddress given;
  given.arena_bytes = 1;
  given.rkey = "r";
  given.worker = "w";
  const auto decoded = ucp::ReaderAddress::decode(given.encode());
  const std::string zeros(64u << 10, '\0');
  CHECK(decoded.rkey == "r" + zeros);
  CHECK(decoded.worker == "w" + zeros);
  given.rkey.clear();
  CHECK(ucp::ReaderAddress::decode(given.encode()).rkey.empty());
}

TEST_CASE("ucx: worker addresses that are cut short reach nobody") {
  if (ucx_transports().empty()) return;
  Ends ends;
  auto address = ucp::ReaderAddress::decode(ends.consumer->address());
  const std::string whole = address.worker.substr(0, address.worker.find_last_not_of('\0') + 1);
  for (size_t size = 1; size < whole.size(); size += 9) {
    CAPTURE(size);
    address.worker = whole.substr(0, size);
    UcxEndpoint producer(*ends.producer_fabric, nullptr);
    CHECK_FALSE(failure_of(producer, address.encode(), 0.5).empty());
  }
}

TEST_CASE("ucx: messages of strangers are as if they had not come") {
  if (ucx_transports().empty()) return;
  for (const bool knows_key : {false, true}) {
    CAPTURE(knows_key);
    Ends ends;
    Bytes address = ends.consumer->address();
    Connected producer(*ends.producer, address);
    Connected consumer(*ends.consumer, ends.producer->address());
    consumer.sink.incoming_hook = [&](uint64_t offset, auto, auto) {
      return ends.arena.data() + offset;
    };
    if (!knows_key) address[4 + 15] ^= std::byte{1};
    UcxEndpoint other_end(*ends.producer_fabric, nullptr);
    Connected stranger(other_end, address);
    for (Connected* end : {&producer, &consumer, &stranger}) end->link->start(end->sink);

    const Bytes theirs(1000, std::byte{1}), ours(1000, std::byte{2});
    stranger.link->write(theirs, 0, to_bytes("theirs"), 1);
    CHECK(stranger.sink.wait([&] { return stranger.sink.written.size() == 1; }));
    // What it sent is a thing of the past when many of ours have come.
    constexpr size_t kMany = 50;
    for (size_t i = 0; i < kMany; ++i) producer.link->write(ours, 0, to_bytes("ours"), i);
    const size_t expected = knows_key ? kMany + 1 : kMany;
    CHECK(consumer.sink.wait([&] { return consumer.sink.landed.size() == expected; }));
    const auto& landed = consumer.sink.landed;
    CHECK(std::any_of(landed.begin(), landed.end(), [](const auto& write) {
            return write.notice == to_bytes("theirs");
          }) == knows_key);
    CHECK(consumer.sink.times_closed() == 0);
  }
}

TEST_CASE("ucx: what a peer sends too early is bounded") {
  for (const std::string& name : ucx_transports()) {
    CAPTURE(name);
    LinkPair pair(name);
    if (over_rdma()) continue;  // messages are small after puts, and datagrams of soft-RoCE slow
    pair.producer->start(pair.producer_sink);
    const Bytes source(8u << 20);
    constexpr size_t kWrites = 12;
    for (uint64_t token = 0; token < kWrites; ++token) {
      pair.producer->write(source, 0, {}, token);
    }
    CHECK(pair.producer_sink.wait([&] { return pair.producer_sink.written.size() == kWrites; }));
    pair.consumer->start(pair.consumer_sink);
    pair.started = true;
    REQUIRE(pair.consumer_sink.wait_closed());
    CHECK(pair.consumer_sink.closed[0].find("before it was asked to") != std::string::npos);
  }
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
