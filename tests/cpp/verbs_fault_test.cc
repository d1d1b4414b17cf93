// What goes wrong below the verbs transport, on adapters that do it on request.

#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <set>
#include <thread>

#include "fork_support.h"
#include "kvxfer/status.h"
#include "verbs_pair.h"

namespace kvxfer::testing {
namespace {

bool eventually(const std::function<bool()>& condition) {
  for (int i = 0; i < 2000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

TEST_SUITE("verbs faults" * doctest::skip(real_devices() != nullptr)) {
  TEST_CASE("a rail that dies is taken out, and all arrives over the other") {
    enum Fault {
      kPort,
      kPeerPort,
      kQueuePairs,
      kQuietQueuePairs,
      kPeerQueuePairs,
      kLostAcks,
      kMemory,
      kOverrun,
      kPeerOverrun,
      kDevice,
      kPeerDevice
    };
    for (const Fault fault : {kPort, kPeerPort, kQueuePairs, kQuietQueuePairs, kPeerQueuePairs,
                              kLostAcks, kMemory, kOverrun, kPeerOverrun, kDevice, kPeerDevice}) {
      CAPTURE(fault);
      reset_world();
      VerbsPair pair;
      check_traffic(pair, 300, 1u << 20, [&](uint32_t id) {
        if (id == 50 && fault == kLostAcks) fake_verbs::lose_acknowledgements("p1", true);
        if (id != 100) return;
        switch (fault) {
          case kPort: return fake_verbs::set_port("p1", 1, false);
          case kPeerPort: return fake_verbs::set_port("c0", 1, false);
          case kQueuePairs: return fake_verbs::break_queue_pairs("p0", true);
          case kQuietQueuePairs: return fake_verbs::break_queue_pairs("p0", false);
          case kPeerQueuePairs: return fake_verbs::break_queue_pairs("c1", false);
          case kLostAcks: return;
          case kMemory: return fake_verbs::revoke_remote_keys("c1");
          case kOverrun: return fake_verbs::overrun_completion_queues("p1");
          case kPeerOverrun: return fake_verbs::overrun_completion_queues("c0");
          case kDevice: return fake_verbs::fail_device("p0");
          case kPeerDevice: return fake_verbs::fail_device("c1");
        }
      });
    }
  }

  TEST_CASE("writes that had arrived are not sent again when their acknowledgements are lost") {
    reset_world();
    VerbsPair pair;
    pair.start();
    fake_verbs::lose_acknowledgements("p0", true);
    fake_verbs::set_retry_ms(1000);  // a slow machine does not come between bytes and notice
    const Bytes source = random_bytes(5000, 1);
    for (uint64_t i = 0; i < 40; ++i) pair.producer->write(source, i * 8192, {}, i);
    CHECK(pair.wait_written(40));
    CHECK(pair.wait_landed(40));
    for (const auto& written : pair.producer_sink.written) CHECK(written.ok);
    const std::string link = pair.producer->describe();
    CAPTURE(link);
    CHECK(link.find("failovers, the last from p0:1 - c0:1: a write failed: transport retry") !=
          std::string::npos);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    CHECK(pair.consumer_sink.landed.size() == 40);
    const uint64_t sent = fake_verbs::bytes_sent("p0", 1) + fake_verbs::bytes_sent("p1", 1);
    CHECK(sent < 41 * (source.size() + 64));
  }

  TEST_CASE("a rail comes back when its port does") {
    reset_world();
    VerbsPair pair;
    pair.start();
    CHECK(pair.producer->rate().value() == 100e9);
    fake_verbs::set_port("p1", 1, false);
    CHECK(eventually([&] { return pair.producer->describe().find("lost") != std::string::npos; }));
    CHECK(pair.producer->rate().value() == 50e9);
    const Bytes source = random_bytes(4u << 20, 1);
    pair.producer->write(source, 0, {}, 1);
    CHECK(pair.wait_written(1));
    const uint64_t before = fake_verbs::bytes_sent("p1", 1);
    fake_verbs::set_port("p1", 1, true);
    CHECK(eventually([&] { return pair.producer->describe().find("lost") == std::string::npos; }));
    CHECK(eventually([&] { return pair.consumer->describe().find("lost") == std::string::npos; }));
    pair.producer->write(source, 0, {}, 2);
    CHECK(pair.wait_written(2));
    CHECK(fake_verbs::bytes_sent("p1", 1) > before + (1u << 20));
  }

  TEST_CASE("with all rails gone the link ends, with the reason, and every write is answered") {
    reset_world();
    VerbsPair pair;
    pair.start();
    const Bytes source = random_bytes(1u << 20, 1);
    const auto memory = pair.producer_fabric->register_memory(
        {const_cast<std::byte*>(source.data()), source.size()}, VerbsAccess::kSource);
    fake_verbs::hold_sends(true);
    for (uint64_t i = 0; i < 100; ++i) pair.producer->write(source, 0, {}, i);
    fake_verbs::set_port("c0", 1, false);
    fake_verbs::set_port("c1", 1, false);
    size_t written_at_close = 0;
    pair.producer_sink.closed_hook = [&](const std::string&) {
      written_at_close = pair.producer_sink.written.size();
    };
    fake_verbs::hold_sends(false);
    CHECK(pair.producer_sink.wait_closed());
    CHECK(written_at_close == 100);
    CHECK(pair.producer_sink.closed[0].find("was lost") != std::string::npos);
    CHECK(pair.producer_sink.closed[0].find("retry") != std::string::npos);
    CHECK(pair.consumer_sink.wait_closed());
    std::set<uint64_t> tokens;
    for (const auto& written : pair.producer_sink.written) tokens.insert(written.token);
    CHECK(tokens.size() == 100);
    CHECK(pair.consumer_sink.landed.empty());
  }

  TEST_CASE("memory that is deregistered everywhere ends the link, and nothing lands after") {
    reset_world();
    VerbsPair pair;
    pair.start();
    const Bytes source = random_bytes(1u << 20, 1);
    const auto memory = pair.producer_fabric->register_memory(
        {const_cast<std::byte*>(source.data()), source.size()}, VerbsAccess::kSource);
    fake_verbs::hold_sends(true);
    for (uint64_t i = 0; i < 20; ++i) pair.producer->write(source, 0, {}, i);
    fake_verbs::revoke_remote_keys("c0");
    fake_verbs::revoke_remote_keys("c1");
    fake_verbs::hold_sends(false);
    CHECK(pair.producer_sink.wait_closed());
    CHECK(pair.consumer_sink.wait_closed());
    CHECK(pair.producer_sink.closed[0].find("was lost: ") != std::string::npos);
    CHECK(pair.producer_sink.written.size() == 20);
    CHECK(pair.consumer_sink.landed.empty());
    CHECK(std::all_of(pair.arena.data(), pair.arena.data() + pair.arena.size(),
                      [](std::byte byte) { return byte == std::byte{}; }));
  }

  TEST_CASE("acknowledged writes whose notices were lost end the link, though a rail is left") {
    reset_world();
    VerbsPair pair;
    std::atomic<int> waiting{0};
    std::atomic<bool> go{false};
    pair.consumer_sink.landed_hook = [&](auto, bool) {
      ++waiting;
      while (!go) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    };
    pair.start();
    const Bytes source = random_bytes(5000, 1);
    for (uint64_t i = 0; i < 8; ++i) pair.producer->write(source, i * 8192, {}, i);
    CHECK(eventually([&] { return waiting == 2; }));  // both threads: nothing is read from here on
    for (uint64_t i = 8; i < 48; ++i) pair.producer->write(source, i * 8192, {}, i);
    CHECK(pair.wait_written(48));
    fake_verbs::overrun_completion_queues("c0", true);
    go = true;
    CHECK(pair.producer_sink.wait_closed());
    CHECK(pair.consumer_sink.wait_closed());
    const std::string reason = pair.producer_sink.closed[0];
    CAPTURE(reason);
    CHECK(reason.find(" acknowledged writes on p0:1 - c0:1 the peer has seen ") !=
          std::string::npos);
    CHECK(pair.consumer_sink.landed.size() < 48);
  }

  TEST_CASE("both sides say which rail was lost, and why") {
    reset_world();
    VerbsPair pair;
    pair.start();
    fake_verbs::overrun_completion_queues("p1");
    CHECK(eventually([&] {
      return pair.consumer->describe().find("2 failovers") != std::string::npos &&
             pair.producer->describe().find("2 failovers") != std::string::npos;
    }));
    const std::string producer = pair.producer->describe(), consumer = pair.consumer->describe();
    CAPTURE(producer);
    CAPTURE(consumer);
    CHECK(producer.find("2 failovers, the last from p1:1 - c1:1: the adapter reports that the "
                        "completion queue overran") != std::string::npos);
    CHECK(consumer.find("2 failovers, the last from c1:1 - p1:1: ") != std::string::npos);
  }

  TEST_CASE("completions that come late, or after the end") {
    reset_world();
    VerbsPair pair;
    pair.start();
    const Bytes source = random_bytes(100'000, 1);
    fake_verbs::hold_send_completions(true);
    for (uint64_t i = 0; i < 10; ++i) pair.producer->write(source, i * source.size(), {}, i);
    CHECK(pair.wait_landed(10));
    CHECK(pair.producer_sink.written.empty());
    SUBCASE("late") {
      fake_verbs::hold_send_completions(false);
      CHECK(pair.wait_written(10));
      for (const auto& written : pair.producer_sink.written) CHECK(written.ok);
    }
    SUBCASE("never") {
      pair.producer->close("they do not come");
      CHECK(pair.producer_sink.wait_closed());
      CHECK(pair.producer_sink.written.size() == 10);
      for (const auto& written : pair.producer_sink.written) CHECK_FALSE(written.ok);
      fake_verbs::hold_send_completions(false);
    }
  }

  TEST_CASE("a receiver with few receives is waited for") {
    reset_world();
    VerbsOptions consumer = options_for(true);
    consumer.receives = 1;
    VerbsPair pair(consumer);
    check_traffic(pair);
  }

  TEST_CASE("a receiver that has stopped ends the path where retries are limited") {
    reset_world();
    VerbsOptions consumer = one_rail(true), producer = one_rail(false);
    consumer.receives = 1;
    consumer.queue_pairs = producer.queue_pairs = 1;
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

  TEST_CASE("an adapter without room, though it said it had some, is tried again") {
    reset_world();
    VerbsPair pair;
    check_traffic(pair, 200, 1u << 20, [&](uint32_t id) {
      if (id % 20 == 3) fake_verbs::fail_calls("post_send", ENOMEM, static_cast<int>(id % 5), 3);
    });
  }

  TEST_CASE("an adapter that refuses a work request for another reason loses the path") {
    reset_world();
    VerbsPair pair;
    check_traffic(pair, 200, 1u << 20, [&](uint32_t id) {
      if (id == 30) fake_verbs::fail_calls("post_send", EINVAL);
      if (id == 90) fake_verbs::fail_calls("post_recv", EIO);
      if (id == 150) fake_verbs::fail_calls("poll_cq", EIO);
    });
  }

  TEST_CASE("a queue pair that cannot be flushed is destroyed all the same") {
    reset_world();
    VerbsPair pair;
    pair.start();
    const Bytes source = random_bytes(1000, 1);
    pair.producer->write(source, 0, {}, 1);
    CHECK(pair.wait_written(1));
    fake_verbs::fail_calls("modify_qp_err", EIO, 0, 100);
    pair.close();
    CHECK(fake_verbs::objects().qps == 0);
  }

  TEST_CASE("each call of the set-up that fails is told, and leaves nothing behind") {
    reset_world();
    for (const std::string call :
         {"get_device_list", "open_device", "query_device", "query_port", "alloc_pd", "query_gid",
          "reg_mr", "create_comp_channel", "create_cq", "create_qp", "modify_qp_init", "post_recv",
          "req_notify_cq", "modify_qp_rtr", "modify_qp_rts"}) {
      CAPTURE(call);
      for (const int skip : {0, 1, 3}) {
        reset_world();
        fake_verbs::fail_calls(call, ENOMEM, skip, 1000);
        bool told = false;
        try {
          VerbsPair pair;
          // A port that cannot be looked at is passed over, and inline data is optional.
          CHECK((call == "query_gid" || call == "query_port" || call == "get_device_list" ||
                 call == "open_device" || call == "query_device" || call == "alloc_pd"));
        } catch (const Error& error) {
          told = true;
          CHECK((error.code() == StatusCode::kNoResources ||
                 error.code() == StatusCode::kUnreachable));
          CHECK(std::string(error.what()).size() > 40);
        }
        if (skip == 0) CHECK(told);
        CHECK(fake_verbs::objects().total() == 0);
      }
    }
  }

  TEST_CASE("memory that cannot be registered for a write ends the link") {
    reset_world();
    VerbsPair pair;
    pair.start();
    const Bytes source = random_bytes(1000, 1);
    fake_verbs::fail_calls("reg_mr", ENOMEM);
    pair.producer->write(source, 0, {}, 1);
    CHECK(pair.producer_sink.wait_closed());
    REQUIRE(pair.producer_sink.written.size() == 1);
    CHECK_FALSE(pair.producer_sink.written[0].ok);
    CHECK(pair.producer_sink.closed[0].find("locked memory") != std::string::npos);
  }

  TEST_CASE("a forked child does not take the parent's objects away" *
            doctest::skip(!kCanForkThreads)) {
    reset_world();
    VerbsPair pair;
    pair.start();
    const auto before = fake_verbs::objects().total();
    const pid_t child = ::fork();
    if (child == 0) {
      pair.producer.reset();
      pair.consumer.reset();
      pair.arena_memory.reset();
      pair.producer_fabric.reset();
      pair.consumer_fabric.reset();
      ::_exit(fake_verbs::objects().total() == before ? 0 : 1);
    }
    int status = -1;
    CHECK(::waitpid(child, &status, 0) == child);
    CHECK(status == 0);
    const Bytes source = random_bytes(1000, 1);
    pair.producer->write(source, 0, {}, 1);
    CHECK(pair.wait_landed(1));
  }
}

}  // namespace
}  // namespace kvxfer::testing
