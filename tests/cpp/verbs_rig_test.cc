// What goes wrong on a real network, on real adapters: run by tests/verbs/rig.sh, which can cut its
// rails and lose their packets.

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>

#include "verbs_pair.h"

namespace kvxfer::testing {
namespace {

const char* rig() { return std::getenv("KVXFER_TEST_RIG"); }

void rig_command(const std::string& what) {
  const std::string command = std::string(rig()) + " " + what;
  REQUIRE(std::system(command.c_str()) == 0);
}

// Ends with both rails as they were.
struct RigGuard {
  ~RigGuard() {
    for (const char* what : {"restore 0", "restore 1", "shape 0", "shape 1"}) {
      static_cast<void>(!std::system((std::string(rig()) + " " + what).c_str()));
    }
  }
};

bool eventually(int seconds, const std::function<bool()>& condition) {
  for (int i = 0; i < seconds * 50; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return false;
}

VerbsOptions patient(bool consumer) {
  VerbsOptions options = options_for(consumer);
  options.queue_pairs = 1;
  options.send_depth = 8;  // what is lost is sent again with all that follows it
  options.timeout = 15;    // a dead rail is noticed in seconds, a slow machine is no dead rail
  return options;
}

struct RigPair : VerbsPair {
  RigPair() : VerbsPair(patient(true), patient(false)) {}
  bool lost(const char* what = "lost") {
    return producer->describe().find(what) != std::string::npos;
  }
};

void run_traffic(RigPair& pair, uint32_t writes, const std::function<void(uint32_t)>& between) {
  Traffic traffic(pair, writes, 64u << 10);
  traffic.register_sources();
  pair.start();
  CHECK(traffic.run(between));
  CHECK(traffic.wait());
  CHECK(traffic.wrong() == 0);
  CHECK(traffic.repeated() == 0);
  CHECK(traffic.right() == writes);
  MESSAGE(pair.producer->describe());
}

TEST_SUITE("verbs rig" * doctest::skip(rig() == nullptr)) {
  TEST_CASE("packets that are lost, late and in another order") {
    const RigGuard guard;
    for (const char* rail : {"0", "1"}) {
      rig_command(std::string("shape ") + rail + " loss 0.3% delay 1ms reorder 1% limit 10000");
    }
    RigPair pair;
    run_traffic(pair, 40, {});
    CHECK_FALSE(pair.lost());
  }

  TEST_CASE("a rail that is cut is taken out, and comes back") {
    const RigGuard guard;
    RigPair pair;
    run_traffic(pair, 200, [&](uint32_t id) {
      if (id == 60) rig_command("cut 1");
    });
    CHECK(eventually(20, [&] { return pair.lost(); }));
    rig_command("restore 1");
    CHECK(eventually(60, [&] { return !pair.lost(); }));
    CHECK(pair.lost("1 failover"));
  }

  TEST_CASE("a rail that swallows everything is found out by its retries") {
    const RigGuard guard;
    RigPair pair;
    run_traffic(pair, 150, [&](uint32_t id) {
      if (id == 60) rig_command("shape 1 loss 100%");
    });
    CHECK(pair.lost("retry"));
  }

  TEST_CASE("a rail whose adapters are removed is taken out") {
    struct Again {
      ~Again() { static_cast<void>(!std::system((std::string(rig()) + " setup").c_str())); }
    } const again;
    RigPair pair;
    run_traffic(pair, 120, [&](uint32_t id) {
      if (id == 60) rig_command("remove 1");
    });
    CHECK(eventually(20, [&] { return pair.lost(); }));
    CHECK(pair.lost("failover"));
  }

  TEST_CASE("a receiver that has stopped ends the path where retries are limited") {
    VerbsOptions consumer = patient(true), producer = patient(false);
    consumer.devices.resize(1);
    producer.devices.resize(1);
    consumer.receives = 1;
    producer.rnr_retry = 3;
    VerbsPair pair(consumer, producer);
    std::atomic<bool> go{false};
    pair.consumer_sink.landed_hook = [&](auto, bool) {
      while (!go) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    };
    pair.start();
    const Bytes source = random_bytes(1000, 1);
    for (uint64_t i = 0; i < 5; ++i) pair.producer->write(source, 0, {}, i);
    CHECK(pair.producer_sink.wait_closed());
    CHECK(pair.producer_sink.closed[0].find("RNR") != std::string::npos);
    CHECK(pair.producer_sink.written.size() == 5);
    go = true;
  }

  TEST_CASE("with both rails cut the link ends with the reason") {
    const RigGuard guard;
    RigPair pair;
    pair.start();
    const Bytes source = random_bytes(256u << 10, 1);
    rig_command("cut 0");
    rig_command("cut 1");
    for (uint64_t i = 0; i < 20; ++i) pair.producer->write(source, 0, {}, i);
    CHECK(pair.producer_sink.wait_closed());
    CHECK(pair.producer_sink.written.size() == 20);
    for (const auto& written : pair.producer_sink.written) CHECK_FALSE(written.ok);
    MESSAGE(pair.producer_sink.closed[0]);
    CHECK(pair.producer_sink.closed[0].find("was lost") != std::string::npos);
    CHECK(pair.consumer_sink.wait_closed());
  }

  TEST_CASE("a key that the peer's adapter does not know fails the queue pairs and the link") {
    RigPair pair;
    VerbsEndpoint consumer_end(*pair.consumer_fabric, pair.arena_memory);
    VerbsEndpoint producer_end(*pair.producer_fabric, nullptr);
    Bytes forged = consumer_end.address();
    forged.back() ^= std::byte{0x55};  // the last rail's key
    const Bytes producer_address = producer_end.address();
    const auto [p, c] = tcp_pair(false);
    auto consumer =
        make_verbs_link(pair.consumer_threads, c, std::move(consumer_end), producer_address);
    auto producer = make_verbs_link(pair.producer_threads, p, std::move(producer_end), forged);
    producer->start(pair.producer_sink);
    consumer->start(pair.consumer_sink);
    const Bytes source = random_bytes(1u << 20, 1);  // striped, so one half meets the bad key
    producer->write(source, 0, {}, 1);
    CHECK(pair.wait_landed(1));  // the other rail takes over
    CHECK(std::equal(source.begin(), source.end(), pair.arena.data()));
    MESSAGE(producer->describe());
    // Whoever notices first gives the reason: the writer that it was an access error, the reader
    // that its queue pair was flushed.
    CHECK(producer->describe().find("lost: ") != std::string::npos);
    producer->close("over");
    consumer->close("over");
    CHECK(pair.producer_sink.wait_closed());
    CHECK(pair.consumer_sink.wait_closed());
  }
}

}  // namespace
}  // namespace kvxfer::testing
