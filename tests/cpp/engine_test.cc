// The engine over every transport, at the level of C++: what Python's tests cannot do under a
// thread sanitizer.

#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include "engine_pair.h"
#include "kvxfer/agent.h"

namespace kvxfer {
namespace {

using namespace std::chrono_literals;
using namespace testing;

TEST_CASE("engine: fetches deliver the offered bytes over every transport") {
  for (const std::string& transport : engine_transports()) {
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
  for (const std::string& transport : engine_transports()) {
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

TEST_CASE("engine: nothing is written after cancel() has returned") {
  for (const std::string& transport : engine_transports()) {
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
  for (const std::string& transport : engine_transports()) {
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
  for (const std::string& transport : engine_transports()) {
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
      CHECK(fetch.report().transport == kind_of(transport));
      CHECK(same_tokens(source, blocks, target, blocks, 480));
      CHECK(offer.wait(10));
      CHECK(offer.outcome().ok());
    }
    CHECK(eventually([&] { return pair.producer.stats().serving == 0; }));
  }
}

TEST_CASE("engine: a fetch that waits leaves the last slot to others") {
  for (const std::string& transport : engine_transports()) {
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
  for (const std::string& transport : engine_transports()) {
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
