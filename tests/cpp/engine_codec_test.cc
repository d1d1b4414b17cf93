// Fetches with codecs over every transport.

#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include "engine_pair.h"
#include "kvxfer/agent.h"

namespace kvxfer {
namespace {

using namespace testing;

float value_of(const std::byte* element) {
  uint16_t bits;
  std::memcpy(&bits, element, 2);
  const uint32_t wide = uint32_t{bits} << 16;
  return std::bit_cast<float>(wide);
}

// The largest difference of any element.
float difference(TestCache& a, TestCache& b, const std::vector<uint32_t>& blocks, uint32_t tokens) {
  float largest = 0;
  for (uint32_t layer = 0; layer < a.layout.layers.size(); ++layer) {
    for (uint32_t plane = 0; plane < 2; ++plane) {
      for (uint32_t head = 0; head < TestCache::kHeads; ++head) {
        for (uint32_t token = 0; token < tokens; ++token) {
          const uint32_t size = a.layout.block_size;
          const std::byte* x = a.row(layer, plane, blocks[token / size], head, token % size);
          const std::byte* y = b.row(layer, plane, blocks[token / size], head, token % size);
          for (uint32_t c = 0; c < TestCache::kContent; ++c) {
            const float off = std::abs(value_of(x + 2 * c) - value_of(y + 2 * c));
            if (!(off <= largest)) largest = off;  // NaN, too
          }
        }
      }
    }
  }
  return largest;
}

TEST_CASE("engine: codecs keep elements as near as they can") {
  for (const std::string& transport : engine_transports()) {
    for (const Codec codec : {Codec::kInt8, Codec::kFloat8E4M3, Codec::kFloat8E5M2}) {
      CAPTURE(transport);
      CAPTURE(codec_name(codec));
      TestCache source(3, 60, 16, Order::kHeadMajor), target(3, 60, 16, Order::kTokenMajor);
      Pair pair(transport);
      const CacheId from = pair.producer.register_cache(source.layout);
      const CacheId to = pair.consumer.register_cache(target.layout);
      source.fill_tame(1);
      std::mt19937 random(3);
      for (uint64_t number = 1; number <= 4; ++number) {
        const uint32_t tokens = 1 + random() % 800;
        const auto blocks = take_blocks(random, 60, (tokens + 15) / 16);
        const bool ready = number % 2 == 0;
        Offer offer = pair.offer(from, blocks, tokens, number, ready);
        const Fetch fetch = pair.fetch(to, target, blocks, tokens, number, 20, {codec});
        if (!ready) offer.mark_all_ready();
        REQUIRE(fetch.wait(20));
        REQUIRE_MESSAGE(fetch.status().ok(), fetch.status().message);
        const float most = codec == Codec::kInt8         ? 0.02f
                           : codec == Codec::kFloat8E4M3 ? 0.1f
                                                         : 0.2f;
        const float found = difference(source, target, blocks, tokens);
        CHECK(found <= most);
        CHECK(found > 0);
        const FetchReport report = fetch.report();
        CHECK(report.codec == codec_name(codec));
        CHECK(report.bytes == uint64_t{tokens} * source.layout.token_bytes());
        CHECK(report.wire_bytes > 0);
        CHECK(report.exceptions == 0);
        CHECK(offer.wait(10));
      }
    }
  }
}

TEST_CASE("engine: fetches with codecs from many threads, some cancelled, leave nothing behind") {
  for (const std::string& transport : engine_transports()) {
    CAPTURE(transport);
    Pair pair(transport);
    TestCache source(2, 64, 16, Order::kHeadMajor);
    source.fill(5);  // full of NaN and extremes: most rows are exceptions
    const CacheId from = pair.producer.register_cache(source.layout);
    std::atomic<uint64_t> next{1};
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&, t] {
        std::mt19937 random(t);
        TestCache target(2, 64, 16, Order::kTokenMajor);
        const CacheId to = pair.consumer.register_cache(target.layout);
        for (int round = 0; round < 15; ++round) {
          const uint64_t number = next++;
          const uint32_t tokens = 1 + random() % 500;
          const auto blocks = take_blocks(random, 64, (tokens + 15) / 16);
          Offer offer = pair.offer(from, blocks, tokens, number);
          Fetch fetch = pair.fetch(to, target, blocks, tokens, number, 20, {Codec::kInt8});
          if (random() % 3 == 0) {
            fetch.cancel();
            offer.release();
          } else if (!fetch.wait(20) || !fetch.status().ok() || fetch.report().exceptions == 0) {
            ++wrong;
          }
          if (!offer.wait(10)) ++wrong;
        }
        pair.consumer.unregister_cache(to);
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(wrong == 0);
    CHECK(eventually([&] {
      const AgentStats stats = pair.consumer.stats();
      return stats.free_slots == stats.slots && stats.quarantined_slots == 0;
    }));
  }
}

TEST_CASE("engine: auto encodes where the link is slow, and nowhere else") {
  const CodecSpec any{Codec::kAuto};
  TestCache source(2, 20, 16, Order::kHeadMajor), target(2, 20, 16, Order::kTokenMajor);
  source.fill_tame(1);
  const std::vector<uint32_t> blocks{1, 2, 3, 4};
  const auto chosen = [&](const std::string& transport, uint64_t rate) {
    LoopbackFaults faults;
    faults.bytes_per_second = rate;
    Pair pair(transport, faults);
    const CacheId from = pair.producer.register_cache(source.layout);
    const CacheId to = pair.consumer.register_cache(target.layout);
    const Offer offer = pair.offer(from, blocks, 64, 1);
    const Fetch fetch = pair.fetch(to, target, blocks, 64, 1, 20, any);
    REQUIRE(fetch.wait(20));
    REQUIRE_MESSAGE(fetch.status().ok(), fetch.status().message);
    CHECK(fetch.report().codec_why.find("auto: ") == 0);
    return fetch.report().codec;
  };
  CHECK(chosen("loopback", 1000000) == "int8");
  CHECK(chosen("loopback", uint64_t{1} << 50) == "raw");
  CHECK(chosen("loopback", 0) == "raw");
  CHECK(chosen("shm", 0) == "raw");
  CHECK(chosen("tcp", 0) == "raw");
}

}  // namespace
}  // namespace kvxfer
