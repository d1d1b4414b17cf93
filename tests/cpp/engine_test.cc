// The engine over every transport, at the level of C++: what Python's tests cannot do under a
// thread sanitizer.

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include "kvxfer/agent.h"
#include "link_pair.h"

namespace kvxfer {
namespace {

using namespace std::chrono_literals;

enum class Order { kHeadMajor, kTokenMajor };

// Paged memory of a small model: separate K and V planes in one allocation, bfloat16.
struct TestCache {
  TestCache(uint32_t layers, uint32_t blocks, uint32_t block_size, Order order)
      : num_blocks(blocks),
        memory(size_t{layers} * 2 * blocks * block_size * kHeads * kContent * 2) {
    layout.num_blocks = blocks;
    layout.block_size = block_size;
    layout.num_heads = kHeads;
    layout.planes = {{"k", kContent}, {"v", kContent}};
    const int64_t row = kContent * 2, block = row * kHeads * block_size;
    for (uint32_t layer = 0; layer < layers; ++layer) {
      layout.layers.push_back("layer." + std::to_string(layer));
      for (int plane = 0; plane < 2; ++plane) {
        std::byte* data = memory.data() + (layer * 2 + plane) * block * blocks;
        layout.views.push_back(order == Order::kHeadMajor
                                   ? PlaneView{data, block, row * block_size, row, 2}
                                   : PlaneView{data, block, row, row * kHeads, 2});
      }
    }
  }

  std::byte* row(uint32_t layer, uint32_t plane, uint32_t block, uint32_t head, uint32_t slot) {
    const PlaneView& view = layout.view(layer, plane);
    return view.data + block * view.block_stride + head * view.head_stride +
           slot * view.token_stride;
  }

  void fill(uint32_t seed) {
    std::mt19937_64 random(seed);
    for (size_t i = 0; i + 8 <= memory.size(); i += 8) {
      const uint64_t word = random();
      std::memcpy(memory.data() + i, &word, 8);
    }
  }
  // With numbers of +-0.5 to +-2 in bfloat16.
  void fill_tame(uint32_t seed) {
    std::mt19937 random(seed);
    for (size_t i = 0; i + 2 <= memory.size(); i += 2) {
      const uint16_t bits = 0x3f00 | (random() & 0x80ff);
      std::memcpy(memory.data() + i, &bits, 2);
    }
  }
  void poison() { std::fill(memory.begin(), memory.end(), std::byte{0xee}); }

  static constexpr uint32_t kHeads = 4, kContent = 32;
  uint32_t num_blocks;
  std::vector<std::byte> memory;
  CacheLayout layout;
};

bool same_tokens(TestCache& a, const std::vector<uint32_t>& a_blocks, TestCache& b,
                 const std::vector<uint32_t>& b_blocks, uint32_t tokens) {
  for (uint32_t layer = 0; layer < a.layout.layers.size(); ++layer) {
    for (uint32_t plane = 0; plane < 2; ++plane) {
      for (uint32_t head = 0; head < TestCache::kHeads; ++head) {
        for (uint32_t token = 0; token < tokens; ++token) {
          const uint32_t as = a.layout.block_size, bs = b.layout.block_size;
          if (std::memcmp(a.row(layer, plane, a_blocks[token / as], head, token % as),
                          b.row(layer, plane, b_blocks[token / bs], head, token % bs),
                          TestCache::kContent * 2) != 0) {
            return false;
          }
        }
      }
    }
  }
  return true;
}

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

Generation generation_of(uint64_t number) {
  Generation generation{};
  std::memcpy(generation.data(), &number, sizeof(number));
  return generation;
}

AgentOptions options_of(const std::string& name, uint64_t incarnation, uint32_t slots = 16) {
  AgentOptions options;
  options.name = name;
  options.incarnation = incarnation;
  options.slot_bytes = 64u << 10;
  options.arena_bytes = uint64_t{slots} * options.slot_bytes;
  options.threads = 2;
  options.inline_bytes = 4096;
  options.heartbeat_interval = 0.05;
  options.heartbeat_timeout = 5;
  return options;
}

// A producer and a consumer, linked over the named transport.
struct Pair {
  explicit Pair(const std::string& transport, const LoopbackFaults& faults = {},
                uint32_t slots = 16)
      : producer(options_of("prefill", 1)), consumer(options_of("decode", 2, slots)) {
    to_producer = consumer.add_peer("prefill");
    const PeerId to_consumer = producer.add_peer("decode");
    std::shared_ptr<Link> ours, theirs;
    if (transport == "loopback") {
      std::tie(theirs, ours) = make_loopback_pair(producer.io(), consumer.io(), faults);
    } else if (transport == "shm") {
      const auto [p, c] = testing::unix_pair();
      const int arena = ::fcntl(consumer.arena_fd(), F_DUPFD_CLOEXEC, 0);
      theirs = make_shm_link(producer.io(), p, arena, consumer.arena_bytes());
      ours = make_shm_link(consumer.io(), c, -1, 0);
    } else {
      const auto [p, c] = testing::tcp_pair(false);
      std::vector<int> producer_data, consumer_data;
      for (int i = 0; i < 2; ++i) {
        const auto [a, b] = testing::tcp_pair(false);
        producer_data.push_back(a);
        consumer_data.push_back(b);
      }
      theirs = make_tcp_link(producer.io(), p, producer_data);
      ours = make_tcp_link(consumer.io(), c, consumer_data);
    }
    producer.attach(to_consumer, theirs, 2, true, "test");
    consumer.attach(to_producer, ours, 1, false, "test");
  }

  Offer offer(CacheId cache, const std::vector<uint32_t>& blocks, uint32_t tokens, uint64_t number,
              bool ready = true) {
    return producer.offer({"request-" + std::to_string(number),
                           generation_of(number),
                           cache,
                           {blocks, 0, 0},
                           tokens,
                           30.0,
                           1,
                           ready});
  }
  Fetch fetch(CacheId cache, TestCache& into, const std::vector<uint32_t>& blocks, uint32_t tokens,
              uint64_t number, double timeout = 20.0, const CodecSpec& codec = {}) {
    FetchSpec spec{"request-" + std::to_string(number),
                   generation_of(number),
                   cache,
                   {blocks, 0, 0},
                   tokens,
                   timeout,
                   {},
                   codec};
    FetchPart part{to_producer, {}, 0, TestCache::kHeads};
    for (uint32_t layer = 0; layer < into.layout.layers.size(); ++layer)
      part.layers.push_back(layer);
    spec.parts = {part};
    return consumer.fetch(spec);
  }

  Agent producer, consumer;
  PeerId to_producer = 0;
};

std::vector<uint32_t> take_blocks(std::mt19937& random, uint32_t num_blocks, uint32_t count) {
  std::vector<uint32_t> all(num_blocks);
  for (uint32_t i = 0; i < num_blocks; ++i) all[i] = i;
  std::shuffle(all.begin(), all.end(), random);
  all.resize(count);
  return all;
}

bool eventually(const std::function<bool()>& condition) {
  for (int i = 0; i < 1000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(5ms);
  }
  return false;
}

TEST_CASE("engine: fetches deliver the offered bytes over every transport") {
  for (const std::string transport : {"loopback", "shm", "tcp"}) {
    CAPTURE(transport);
    std::mt19937 random(7);
    TestCache source(3, 40, 16, Order::kHeadMajor), target(3, 30, 24, Order::kTokenMajor);
    Pair pair(transport);
    const CacheId from = pair.producer.register_cache(source.layout);
    const CacheId to = pair.consumer.register_cache(target.layout);
    for (uint64_t number = 1; number <= 20; ++number) {
      CAPTURE(number);
      const uint32_t tokens = 1 + random() % 400;
      source.fill(static_cast<uint32_t>(number));
      target.poison();
      const auto source_blocks = take_blocks(random, 40, (tokens + 15) / 16);
      const auto target_blocks = take_blocks(random, 30, (tokens + 23) / 24);
      const Offer offer = pair.offer(from, source_blocks, tokens, number);
      const Fetch fetch = pair.fetch(to, target, target_blocks, tokens, number);
      REQUIRE(fetch.wait(20));
      REQUIRE_MESSAGE(fetch.status().ok(), fetch.status().message);
      CHECK(same_tokens(source, source_blocks, target, target_blocks, tokens));
      CHECK(offer.wait(10));
      CHECK(offer.outcome().ok());
    }
    CHECK(eventually([&] { return pair.producer.stats().serving == 0; }));
    const AgentStats stats = pair.consumer.stats();
    CHECK(stats.free_slots == stats.slots);
    CHECK(stats.fetches == 0);
  }
}

TEST_CASE("engine: layers are sent as they become ready") {
  for (const std::string transport : {"loopback", "shm", "tcp"}) {
    CAPTURE(transport);
    TestCache source(4, 40, 16, Order::kHeadMajor), target(4, 40, 16, Order::kTokenMajor);
    Pair pair(transport);
    const CacheId from = pair.producer.register_cache(source.layout);
    const CacheId to = pair.consumer.register_cache(target.layout);
    const std::vector<uint32_t> blocks{5, 3, 8};
    source.fill(1);
    // The fetch comes before the offer, the layers in no particular order.
    const Fetch fetch = pair.fetch(to, target, blocks, 40, 1);
    Offer offer = pair.offer(from, blocks, 40, 1, false);
    for (uint32_t layer : {2u, 0u, 3u}) offer.mark_ready(layer);
    CHECK_FALSE(fetch.wait(0.1));
    offer.mark_ready(1);
    REQUIRE(fetch.wait(10));
    REQUIRE_MESSAGE(fetch.status().ok(), fetch.status().message);
    CHECK(same_tokens(source, blocks, target, blocks, 40));
  }
}

TEST_CASE("engine: codecs keep elements as near as they can") {
  for (const std::string transport : {"loopback", "shm", "tcp"}) {
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
  for (const std::string transport : {"loopback", "shm", "tcp"}) {
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

TEST_CASE("engine: nothing is written after cancel() has returned") {
  for (const std::string transport : {"loopback", "shm", "tcp"}) {
    CAPTURE(transport);
    std::mt19937 random(11);
    LoopbackFaults faults;
    faults.delay_us = 300;
    TestCache source(3, 60, 16, Order::kHeadMajor), target(3, 60, 16, Order::kTokenMajor);
    Pair pair(transport, faults);
    const CacheId from = pair.producer.register_cache(source.layout);
    const CacheId to = pair.consumer.register_cache(target.layout);
    source.fill(3);
    for (uint64_t number = 1; number <= 40; ++number) {
      const auto blocks = take_blocks(random, 60, 50);
      Offer offer = pair.offer(from, blocks, 800, number);
      Fetch fetch = pair.fetch(to, target, blocks, 800, number);
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 1500));
      fetch.cancel();
      CHECK(fetch.done());
      target.poison();
      const auto before = target.memory;
      std::this_thread::sleep_for(2ms);
      CHECK(target.memory == before);
      offer.release();
      CHECK(offer.wait(5));
    }
    CHECK(eventually([&] {
      const AgentStats stats = pair.consumer.stats();
      return stats.free_slots == stats.slots && stats.quarantined_slots == 0;
    }));
    CHECK(eventually([&] { return pair.producer.stats().serving == 0; }));
  }
}

TEST_CASE("engine: many fetches from many threads, some cancelled, share the arena") {
  for (const std::string transport : {"loopback", "shm", "tcp"}) {
    CAPTURE(transport);
    Pair pair(transport);
    TestCache source(2, 64, 16, Order::kHeadMajor);
    source.fill(5);
    const CacheId from = pair.producer.register_cache(source.layout);
    std::atomic<uint64_t> next{1};
    std::atomic<int> wrong{0}, delivered{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        std::mt19937 random(t);
        TestCache target(2, 64, 8, Order::kTokenMajor);
        const CacheId to = pair.consumer.register_cache(target.layout);
        for (int round = 0; round < 25; ++round) {
          const uint64_t number = next++;
          const uint32_t tokens = 1 + random() % 500;
          const auto source_blocks = take_blocks(random, 64, (tokens + 15) / 16);
          const auto target_blocks = take_blocks(random, 64, (tokens + 7) / 8);
          Offer offer = pair.offer(from, source_blocks, tokens, number);
          Fetch fetch = pair.fetch(to, target, target_blocks, tokens, number);
          if (random() % 4 == 0) {
            fetch.cancel();
            offer.release();
          } else if (!fetch.wait(20) || !fetch.status().ok() ||
                     !same_tokens(source, source_blocks, target, target_blocks, tokens)) {
            ++wrong;
          } else {
            ++delivered;
          }
          if (!offer.wait(10)) ++wrong;
        }
        pair.consumer.unregister_cache(to);
      });
    }
    for (auto& thread : threads) thread.join();
    CHECK(wrong == 0);
    CHECK(delivered > 0);
    CHECK(eventually(
        [&] { return pair.consumer.stats().free_slots == pair.consumer.stats().slots; }));
  }
}

TEST_CASE("engine: every byte that a link corrupts is caught") {
  LoopbackFaults faults;
  faults.corrupt_write = 1;
  TestCache source(2, 20, 16, Order::kHeadMajor), target(2, 20, 16, Order::kHeadMajor);
  Pair pair("loopback", faults);
  const CacheId from = pair.producer.register_cache(source.layout);
  const CacheId to = pair.consumer.register_cache(target.layout);
  for (uint64_t number = 1; number <= 20; ++number) {
    const std::vector<uint32_t> blocks{1, 2, 3};
    const Offer offer = pair.offer(from, blocks, 48, number);
    const Fetch fetch = pair.fetch(to, target, blocks, 48, number);
    REQUIRE(fetch.wait(10));
    CHECK(fetch.status().code == StatusCode::kCorrupt);
  }
  CHECK(pair.consumer.stats().digest_errors == 20);
}

TEST_CASE("engine: a link that loses, repeats and reorders never delivers a wrong byte") {
  LoopbackFaults faults;
  faults.drop_write = 0.05;
  faults.duplicate_write = 0.2;
  faults.reorder_write = 0.3;
  faults.delay_us = 200;
  TestCache source(3, 60, 16, Order::kHeadMajor), target(3, 60, 16, Order::kTokenMajor);
  Pair pair("loopback", faults);
  const CacheId from = pair.producer.register_cache(source.layout);
  const CacheId to = pair.consumer.register_cache(target.layout);
  std::mt19937 random(1);
  int delivered = 0;
  for (uint64_t number = 1; number <= 30; ++number) {
    source.fill(static_cast<uint32_t>(number));
    target.poison();
    const auto blocks = take_blocks(random, 60, 30);
    Offer offer = pair.offer(from, blocks, 480, number);
    const Fetch fetch = pair.fetch(to, target, blocks, 480, number, 0.5);
    REQUIRE(fetch.wait(10));
    if (fetch.status().ok()) {
      ++delivered;
      CHECK(same_tokens(source, blocks, target, blocks, 480));
    }
    offer.release();
    CHECK(offer.wait(5));
  }
  CHECK(delivered > 0);
}

TEST_CASE("engine: refusals say why") {
  Pair pair("loopback");
  TestCache source(2, 20, 16, Order::kHeadMajor), target(2, 20, 16, Order::kHeadMajor);
  const CacheId from = pair.producer.register_cache(source.layout);
  const CacheId to = pair.consumer.register_cache(target.layout);
  const std::vector<uint32_t> blocks{1, 2, 3};
  const auto end_of = [&](const Fetch& fetch) {
    REQUIRE(fetch.wait(10));
    return fetch.status().code;
  };
  Offer offer = pair.offer(from, blocks, 48, 1);
  CHECK(end_of(pair.fetch(to, target, blocks, 48, 1)) == StatusCode::kOk);
  REQUIRE(offer.wait(5));
  CHECK(end_of(pair.fetch(to, target, blocks, 48, 1)) == StatusCode::kStale);  // served already
  pair.offer(from, blocks, 20, 2);
  CHECK(end_of(pair.fetch(to, target, blocks, 48, 2)) ==
        StatusCode::kMismatch);  // more than offered
  CHECK(end_of(pair.fetch(to, target, blocks, 48, 99, 0.2)) ==
        StatusCode::kTimeout);  // never offered
  const Offer brief =
      pair.producer.offer({"brief", generation_of(5), from, {blocks, 0, 0}, 48, 0.1, 1, true});
  REQUIRE(brief.wait(5));
  CHECK(brief.outcome().code == StatusCode::kExpired);
  CHECK(end_of(pair.fetch(to, target, blocks, 48, 5)) == StatusCode::kExpired);
}

TEST_CASE("engine: a fetch in two parts at one agent counts as one consumer") {
  for (const std::string transport : {"loopback", "shm", "tcp"}) {
    CAPTURE(transport);
    Pair pair(transport);
    TestCache source(4, 40, 16, Order::kHeadMajor), target(4, 40, 16, Order::kTokenMajor);
    source.fill(9);
    const CacheId from = pair.producer.register_cache(source.layout);
    const CacheId to = pair.consumer.register_cache(target.layout);
    std::vector<uint32_t> blocks(30);
    for (uint32_t i = 0; i < blocks.size(); ++i) blocks[i] = 2 + i;
    for (uint64_t number = 1; number <= 10; ++number) {
      target.poison();
      const Offer offer = pair.offer(from, blocks, 480, number);
      FetchSpec spec{"request-" + std::to_string(number),
                     generation_of(number),
                     to,
                     {blocks, 0, 0},
                     480,
                     20,
                     {}};
      spec.parts = {{pair.to_producer, {0, 1, 2}, 0, 4},
                    {pair.to_producer, {3}, 0, 2},
                    {pair.to_producer, {3}, 2, 4}};
      const Fetch fetch = pair.consumer.fetch(spec);
      REQUIRE(fetch.wait(20));
      REQUIRE_MESSAGE(fetch.status().ok(), fetch.status().message);
      CHECK(fetch.report().transport == transport);
      CHECK(same_tokens(source, blocks, target, blocks, 480));
      CHECK(offer.wait(10));
      CHECK(offer.outcome().ok());
    }
    CHECK(eventually([&] { return pair.producer.stats().serving == 0; }));
  }
}

TEST_CASE("engine: a fetch that waits leaves the last slot to others") {
  for (const std::string transport : {"loopback", "shm", "tcp"}) {
    CAPTURE(transport);
    Pair pair(transport, {}, /*slots=*/1);
    TestCache source(2, 40, 16, Order::kHeadMajor), target(2, 40, 16, Order::kTokenMajor);
    source.fill(9);
    const CacheId from = pair.producer.register_cache(source.layout);
    const CacheId to = pair.consumer.register_cache(target.layout);
    Fetch waiting = pair.fetch(to, target, {1, 2}, 32, 1);  // nobody offers it
    const Offer slow = pair.offer(from, {3, 4}, 32, 2, /*ready=*/false);
    Fetch layers = pair.fetch(to, target, {3, 4}, 32, 2);  // its layers never come
    const Offer offer = pair.offer(from, {5, 6}, 32, 3);
    const Fetch fetch = pair.fetch(to, target, {5, 6}, 32, 3);
    REQUIRE(fetch.wait(20));
    CHECK_MESSAGE(fetch.status().ok(), fetch.status().message);
    waiting.cancel();
    layers.cancel();
  }
}

TEST_CASE("engine: the end of an agent ends what its peers wait for") {
  for (const std::string transport : {"loopback", "shm", "tcp"}) {
    CAPTURE(transport);
    auto pair = std::make_unique<Pair>(transport);
    TestCache source(2, 20, 16, Order::kHeadMajor), target(2, 20, 16, Order::kHeadMajor);
    const CacheId from = pair->producer.register_cache(source.layout);
    const CacheId to = pair->consumer.register_cache(target.layout);
    const Offer offer = pair->offer(from, {1, 2}, 20, 1, false);
    const Fetch fetch = pair->fetch(to, target, {1, 2}, 20, 1);
    std::this_thread::sleep_for(20ms);
    pair->producer.close();
    CHECK(offer.released());
    CHECK(offer.outcome().code == StatusCode::kClosed);
    REQUIRE(fetch.wait(5));
    const StatusCode code = fetch.status().code;
    CHECK((code == StatusCode::kClosed || code == StatusCode::kPeerLost));
    CHECK(eventually(
        [&] { return pair->consumer.stats().free_slots == pair->consumer.stats().slots; }));
    pair.reset();
    CHECK(fetch.done());  // handles outlive their agents
  }
}

}  // namespace
}  // namespace kvxfer
