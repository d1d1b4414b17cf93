// Offers that end without a fetch: consumers that decline or give up, owners that reject, and how
// many fetches an offer waits for.

#include <doctest/doctest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "engine_pair.h"

namespace kvxfer::testing {
namespace {

const std::vector<std::string> kTransports = {"loopback", "shm", "tcp"};
const std::vector<uint32_t> kBlocks = {3, 1, 7, 4};
constexpr uint32_t kTokens = 60;

// A pair with a cache on each side, and offers and fetches of the same four blocks.
struct Rig : Pair {
  explicit Rig(const std::string& transport, const LoopbackFaults& faults = {})
      : Pair(transport, faults) {
    source.fill(1);
    source_id = producer.register_cache(source.layout);
    target_id = consumer.register_cache(target.layout);
    other_id = consumer.register_cache(target.layout);
  }

  Offer make(uint64_t number, uint32_t consumers = 1, bool ready = true, double lease = 30) {
    return producer.offer({"request-" + std::to_string(number),
                           generation_of(number),
                           source_id,
                           {kBlocks, 0, 0},
                           kTokens,
                           lease,
                           consumers,
                           ready});
  }
  Fetch get(uint64_t number, uint32_t consumers = 1, double timeout = 20) {
    FetchSpec spec{"request-" + std::to_string(number),
                   generation_of(number),
                   target_id,
                   {kBlocks, 0, 0},
                   kTokens,
                   timeout,
                   {},
                   {}};
    spec.parts = {{to_producer, {0, 1}, 0, TestCache::kHeads, consumers}};
    return consumer.fetch(spec);
  }
  Fetch decline(uint64_t number, uint32_t consumers = 1, double timeout = 20, CacheId cache = 0) {
    return consumer.decline({"request-" + std::to_string(number),
                             generation_of(number),
                             cache == 0 ? target_id : cache,
                             timeout,
                             {{to_producer, consumers}}});
  }
  // Everything is given back, on both sides.
  bool at_rest() {
    return eventually([&] {
      const AgentStats p = producer.stats(), c = consumer.stats();
      return p.offers == 0 && p.serving == 0 && c.fetches == 0 && c.quarantined_slots == 0 &&
             c.free_slots == c.slots;
    });
  }

  TestCache source{2, 16, 16, Order::kHeadMajor}, target{2, 16, 16, Order::kTokenMajor};
  CacheId source_id = 0, target_id = 0, other_id = 0;
};

Status end_of(const Fetch& fetch) {
  REQUIRE(fetch.wait(20));
  return fetch.status();
}

Status end_of(const Offer& offer) {
  REQUIRE(offer.wait(20));
  return offer.outcome();
}

TEST_CASE("decline: ends an offer and moves nothing, ready or not") {
  for (const std::string& transport : kTransports) {
    for (const bool ready : {true, false}) {
      CAPTURE(transport);
      Rig rig(transport);
      const Offer offer = rig.make(1, 1, ready);
      CHECK(end_of(rig.decline(1)).code == StatusCode::kOk);
      const Status outcome = end_of(offer);
      CHECK(outcome.ok());
      CHECK(outcome.message.find("1 of 1 consumers did not fetch it") != std::string::npos);
      CHECK(rig.producer.stats().bytes_sent == 0);
      CHECK(rig.at_rest());
      const Status late = end_of(rig.get(1));
      CHECK(late.code == StatusCode::kStale);
      CHECK(late.message.find("fetched or declined") != std::string::npos);
      CHECK(end_of(rig.decline(1)).ok());  // it is over: nothing to count
      CHECK(rig.at_rest());
    }
  }
}

TEST_CASE("decline: waits for an offer that is not made yet, and counts then") {
  for (const std::string& transport : kTransports) {
    CAPTURE(transport);
    Rig rig(transport);
    const Fetch decline = rig.decline(1);
    CHECK(eventually([&] { return rig.producer.stats().serving == 1; }));
    CHECK(!decline.done());
    const Offer offer = rig.make(1, 1, /*ready=*/false);
    CHECK(end_of(decline).ok());
    CHECK(end_of(offer).ok());
    CHECK(rig.at_rest());
  }
}

TEST_CASE("decline: is taken back at its deadline, by cancel(), and with its connection") {
  for (const std::string& transport : kTransports) {
    CAPTURE(transport);
    Rig rig(transport);
    const Status late = end_of(rig.decline(1, 1, 0.02));
    CHECK(late.code == StatusCode::kTimeout);
    CHECK(late.message.find("'prefill' has not noted it") != std::string::npos);
    Fetch cancelled = rig.decline(2);
    cancelled.cancel();
    CHECK(cancelled.status().code == StatusCode::kCancelled);
    const Offer flush = rig.make(99);
    CHECK(end_of(rig.get(99)).ok());  // what was said before has been heard
    CHECK(rig.at_rest());
    const Offer first = rig.make(1), second = rig.make(2);
    CHECK(end_of(rig.get(1)).ok());  // the offer is still there
    CHECK(end_of(rig.get(2)).ok());

    const Fetch lost = rig.decline(3);
    CHECK(eventually([&] { return rig.producer.stats().serving == 1; }));
    rig.consumer.close();
    CHECK(lost.status().code == StatusCode::kClosed);
    CHECK(eventually([&] { return rig.producer.stats().serving == 0; }));
    const Offer third = rig.make(3, 1, true, 0.05);
    CHECK(end_of(third).code == StatusCode::kExpired);  // its lease is for those that die
  }
}

TEST_CASE("decline: counts once for each of a consumer's caches, and not what was fetched") {
  for (const std::string& transport : kTransports) {
    CAPTURE(transport);
    Rig rig(transport);
    const Offer offer = rig.make(1, 3);
    for (int i = 0; i < 3; ++i) CHECK(end_of(rig.decline(1)).ok());
    CHECK(end_of(rig.get(1)).ok());      // stands for the decline, which was counted
    CHECK(end_of(rig.decline(1)).ok());  // and this for the fetch
    CHECK(!offer.wait(0.02));
    CHECK(end_of(rig.decline(1, 1, 20, rig.other_id)).ok());
    CHECK(!offer.wait(0.02));
    CHECK(end_of(rig.get(1)).ok());
    CHECK(end_of(offer).ok());

    // Both wait for an offer that is made later.
    const Fetch one = rig.decline(2), two = rig.decline(2);
    CHECK(eventually([&] { return rig.producer.stats().serving == 2; }));
    const Offer later = rig.make(2, 2);
    CHECK(end_of(one).ok());
    CHECK(end_of(two).ok());
    CHECK(!later.wait(0.02));
    CHECK(end_of(rig.decline(2, 1, 20, rig.other_id)).ok());
    CHECK(end_of(later).ok());
    CHECK(rig.at_rest());
  }
}

TEST_CASE("decline: one that names another offer's generation counts for none") {
  Rig rig("shm");
  const Offer offer = rig.make(1);
  const Fetch wrong = rig.consumer.decline(
      {"request-2", generation_of(1), rig.target_id, 20.0, {{rig.to_producer, 1}}});
  CHECK(end_of(wrong).ok());
  const Fetch old = rig.consumer.decline(
      {"request-1", generation_of(9), rig.target_id, 20.0, {{rig.to_producer, 1}}});
  CHECK(end_of(old).ok());
  CHECK(!offer.wait(0.02));
  CHECK(end_of(rig.get(1)).ok());
  CHECK(end_of(offer).ok());
}

TEST_CASE("decline: what makes no sense is refused at the call") {
  Rig rig("loopback");
  const auto code = [&](const DeclineSpec& spec) {
    try {
      const Fetch made = rig.consumer.decline(spec);
    } catch (const Error& error) {
      return error.code();
    }
    return StatusCode::kOk;
  };
  const DeclineSpec good{
      "request-1", generation_of(1), rig.target_id, 20.0, {{rig.to_producer, 1}}};
  DeclineSpec spec = good;
  spec.offer_id = "";
  CHECK(code(spec) == StatusCode::kInvalid);
  spec = good;
  spec.cache = 99;
  CHECK(code(spec) == StatusCode::kInvalid);
  spec = good;
  spec.timeout = 0;
  CHECK(code(spec) == StatusCode::kInvalid);
  spec = good;
  spec.parts.clear();
  CHECK(code(spec) == StatusCode::kInvalid);
  spec.parts = {{rig.to_producer, 1}, {rig.to_producer, 1}};
  CHECK(code(spec) == StatusCode::kInvalid);
  spec.parts = {{99, 1}};
  CHECK(code(spec) == StatusCode::kPeerLost);
  CHECK(rig.at_rest());
}

TEST_CASE("decline: a peer that fails leaves the others alone") {
  Rig rig("tcp");
  Agent second(options_of("second", 7));
  const PeerId to_second = rig.consumer.add_peer("second");
  const auto [theirs, ours] = make_loopback_pair(second.io(), rig.consumer.io());
  second.attach(second.add_peer("decode"), theirs, 2, true, "test");
  rig.consumer.attach(to_second, ours, 7, false, "test");
  const PeerId never = rig.consumer.add_peer("never");

  const Fetch decline = rig.consumer.decline({"request-1",
                                              generation_of(1),
                                              rig.target_id,
                                              20.0,
                                              {{never, 1}, {to_second, 1}, {rig.to_producer, 1}}});
  CHECK(eventually([&] { return rig.producer.stats().serving == 1; }));
  rig.consumer.fail_peer(never, {StatusCode::kUnreachable, "nobody there"});
  second.close();
  CHECK(eventually([&] { return rig.consumer.stats().peers == 1; }));
  CHECK(!decline.done());
  const Offer offer = rig.make(1);
  CHECK(end_of(offer).ok());
  CHECK(end_of(decline).code == StatusCode::kUnreachable);  // the first failure
  CHECK(rig.at_rest());
}

TEST_CASE("cancel: plain, the offer stays; for good, it counts, waiting, sending or failed") {
  for (const std::string& transport : kTransports) {
    CAPTURE(transport);
    Rig rig(transport);
    const Offer kept = rig.make(1, 1, /*ready=*/false);
    Fetch fetch = rig.get(1);
    fetch.cancel();
    CHECK(!kept.released());
    fetch.cancel(true);  // has ended before
    fetch.cancel(true);
    CHECK(end_of(kept).ok());

    // Not accepted yet: the offer comes later.
    Fetch early = rig.get(2);
    CHECK(eventually([&] { return rig.producer.stats().serving == 1; }));
    early.cancel(true);
    CHECK(early.status().code == StatusCode::kCancelled);
    CHECK(end_of(rig.make(2)).ok());

    // Two of one agent, each counts.
    const Offer both = rig.make(3, 2, false);
    Fetch one = rig.get(3), two = rig.get(3);
    one.cancel(true);
    CHECK(eventually([&] { return rig.consumer.stats().fetches == 1; }));
    CHECK(!both.released());
    two.cancel(true);
    CHECK(end_of(both).ok());

    // It had failed by itself.
    const Offer unready = rig.make(4, 1, false);
    Fetch slow = rig.get(4, 1, 0.02);
    CHECK(end_of(slow).code == StatusCode::kTimeout);
    CHECK(!unready.released());
    slow.cancel(true);
    CHECK(end_of(unready).ok());

    // It has delivered: that was counted already.
    const Offer two_more = rig.make(5, 2);
    Fetch delivered = rig.get(5);
    CHECK(end_of(delivered).ok());
    delivered.cancel(true);
    CHECK(delivered.status().ok());
    CHECK(!two_more.wait(0.02));
    CHECK(end_of(rig.get(5)).ok());
    CHECK(end_of(two_more).ok());

    // It had declined, which was counted then; a second one that gives up is another.
    const Offer twice = rig.make(6, 2, false);
    CHECK(end_of(rig.decline(6)).ok());
    Fetch changed = rig.get(6), another = rig.get(6);
    changed.cancel(true);
    CHECK(eventually([&] { return rig.consumer.stats().fetches == 1; }));
    CHECK(!twice.released());
    another.cancel(true);
    CHECK(end_of(twice).ok());
    CHECK(rig.at_rest());
  }
}

TEST_CASE("cancel: for good, while chunks are under way") {
  for (const std::string& transport : kTransports) {
    CAPTURE(transport);
    LoopbackFaults slow;
    slow.delay_us = 2000;
    Rig rig(transport, slow);
    for (uint64_t number = 1; number <= 20; ++number) {
      const Offer offer = rig.make(number);
      Fetch fetch = rig.get(number);
      if (number % 2) fetch.wait(0.0005 * static_cast<double>(number));
      fetch.cancel(true);
      CHECK(end_of(offer).ok());  // fetched or not
    }
    CHECK(rig.at_rest());
  }
}

TEST_CASE("consumers: an offer waits for as many fetches as one of them tells of") {
  for (const std::string& transport : kTransports) {
    CAPTURE(transport);
    Rig rig(transport);
    const Offer offer = rig.make(1);
    CHECK(end_of(rig.get(1, 3)).ok());
    CHECK(!offer.wait(0.02));
    CHECK(end_of(rig.get(1, 1)).ok());  // knows of less
    CHECK(!offer.wait(0.02));
    CHECK(end_of(rig.get(1, 2)).ok());
    CHECK(end_of(offer).ok());

    const Offer more = rig.make(2, 2);  // the owner knows of more
    CHECK(end_of(rig.get(2, 1)).ok());
    CHECK(!more.wait(0.02));
    CHECK(end_of(rig.get(2, 0)).ok());
    CHECK(end_of(more).ok());

    // A decline knows it, too, and others may come first.
    const Fetch decline = rig.decline(3, 2), early = rig.get(3, 2);
    CHECK(eventually([&] { return rig.producer.stats().serving == 2; }));
    const Offer third = rig.make(3);
    CHECK(end_of(decline).ok());
    CHECK(end_of(early).ok());
    CHECK(!third.wait(0.02));  // that fetch was by who had declined
    CHECK(end_of(rig.get(3, 2)).ok());
    CHECK(end_of(third).ok());

    const Offer told = rig.make(4, 1, true, 0.1);
    CHECK(end_of(rig.get(4, UINT32_MAX)).ok());
    CHECK(end_of(told).code == StatusCode::kExpired);
    CHECK(rig.at_rest());
  }
}

TEST_CASE("reject: fails fetches that wait, and later ones, with the reason") {
  for (const std::string& transport : kTransports) {
    CAPTURE(transport);
    Rig rig(transport);
    const Fetch waiting = rig.get(1), declined = rig.decline(1);
    CHECK(eventually([&] { return rig.producer.stats().serving == 2; }));
    rig.producer.reject("request-1", generation_of(1), "the request was aborted");
    const Status status = end_of(waiting);
    CHECK(status.code == StatusCode::kWithdrawn);
    CHECK(status.message.find("'request-1' was withdrawn: the request was aborted") !=
          std::string::npos);
    CHECK(end_of(declined).ok());
    CHECK(end_of(rig.get(1)).code == StatusCode::kWithdrawn);
    CHECK(end_of(rig.decline(1)).ok());
    rig.producer.reject("request-1", generation_of(1), "twice");
    CHECK_THROWS_AS(rig.make(1), Error);

    const Offer open = rig.make(2, 1, /*ready=*/false);
    const Fetch served = rig.get(2);
    CHECK(eventually([&] { return rig.producer.stats().serving == 1; }));
    rig.producer.reject("request-2", generation_of(2), "");
    CHECK(end_of(served).code == StatusCode::kWithdrawn);
    CHECK(end_of(open).code == StatusCode::kWithdrawn);

    const Offer done = rig.make(3);
    CHECK(end_of(rig.get(3)).ok());
    CHECK(end_of(done).ok());
    rig.producer.reject("request-3", generation_of(3), "too late");
    CHECK(done.outcome().ok());
    CHECK(end_of(rig.get(3)).code == StatusCode::kStale);
    CHECK(rig.at_rest());
  }
}

TEST_CASE("decline, cancel and reject from many threads, against leases that run out") {
  for (const std::string& transport : kTransports) {
    CAPTURE(transport);
    Rig rig(transport);
    constexpr uint64_t kRequests = 120;
    std::atomic<uint64_t> next{1};
    std::vector<std::thread> threads;
    for (int seed = 0; seed < 4; ++seed) {
      threads.emplace_back([&, seed] {
        std::mt19937 random(static_cast<uint32_t>(seed));
        for (uint64_t number; (number = next++) <= kRequests;) {
          std::vector<Fetch> fetches;
          std::vector<Offer> offers;
          const auto promise = [&] {
            if (random() % 4 == 0) {
              rig.producer.reject("request-" + std::to_string(number), generation_of(number), "");
            } else {
              offers.push_back(
                  rig.make(number, 1 + random() % 2, random() % 2, random() % 2 ? 0.002 : 0.05));
            }
          };
          const bool first = random() % 2;
          if (first) promise();
          for (int i = 0; i < 3; ++i) {
            const double timeout = random() % 2 ? 0.001 : 0.2;
            fetches.push_back(random() % 2 ? rig.get(number, 1 + random() % 2, timeout)
                                           : rig.decline(number, 1 + random() % 2, timeout));
            if (i == 1 && !first) promise();
          }
          for (Fetch& fetch : fetches) {
            if (random() % 2) fetch.cancel(random() % 2);
          }
          for (const Offer& offer : offers) CHECK(offer.wait(20));
          for (const Fetch& fetch : fetches) CHECK(fetch.wait(20));
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(rig.at_rest());
    rig.consumer.unregister_cache(rig.target_id);
    rig.producer.unregister_cache(rig.source_id);
  }
}

}  // namespace
}  // namespace kvxfer::testing
