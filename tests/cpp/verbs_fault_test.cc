// What goes wrong below the verbs transport, on adapters that do it on request.

#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include <algorithm>
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

std::vector<fake_verbs::Device> two_hosts_with(
    const std::function<void(fake_verbs::Device&)>& change) {
  auto devices = two_hosts();
  for (auto& device : devices) change(device);
  return devices;
}

VerbsOptions one_rail(bool consumer) {
  VerbsOptions options = options_for(consumer);
  options.devices.resize(1);
  return options;
}

// Everything lands once, intact.
void run_traffic(VerbsPair& pair, uint32_t writes = 400, size_t slot_bytes = 1u << 20,
                 const std::function<void(uint32_t)>& between = {}) {
  Traffic traffic(pair, writes, slot_bytes);
  traffic.register_sources();
  pair.start();
  const bool all = traffic.run(between) && traffic.wait();
  CHECK_MESSAGE(all, pair.producer->describe());
  CHECK_MESSAGE(pair.producer_sink.times_closed() == 0, pair.producer_sink.closed[0]);
  CHECK(traffic.wrong() == 0);
  CHECK(traffic.right() == writes);
  CHECK(traffic.repeated() == 0);
  for (const auto& written : pair.producer_sink.written) CHECK(written.ok);
  pair.close();
}

TEST_SUITE("verbs faults" * doctest::skip(real_devices() != nullptr)) {
  TEST_CASE("adapters without a shared receive queue, with few places and short messages") {
    SUBCASE("places for one") {
      reset_world(two_hosts_with([](auto& device) { device.max_qp_wr = 2; }));
    }
    SUBCASE("nothing inline") {
      reset_world(two_hosts_with([](auto& device) { device.max_inline = 0; }));
    }
    SUBCASE("messages of 64 KiB, registrations of 300 KiB") {
      reset_world(two_hosts_with([](auto& device) {
        device.ports[0].max_message = 65536;
        device.max_mr_size = 300u << 10;
      }));
    }
    SUBCASE("all of it") {
      reset_world(two_hosts_with([](auto& device) {
        device.max_qp_wr = 3;
        device.max_inline = 0;
        device.ports[0].max_message = 65536;
        device.max_mr_size = 300u << 10;
      }));
    }
    VerbsPair pair;
    run_traffic(pair, 120);
  }

  TEST_CASE("a full queue is waited for, and its requests go out in lists") {
    reset_world();
    VerbsOptions consumer = one_rail(true), producer = one_rail(false);
    consumer.queue_pairs = producer.queue_pairs = 1;
    producer.send_depth = 16;
    VerbsPair pair(consumer, producer);
    pair.start();
    const Bytes source = random_bytes(16384, 1);
    const auto memory = pair.producer_fabric->register_memory(
        {const_cast<std::byte*>(source.data()), source.size()}, VerbsAccess::kSource);
    fake_verbs::clear_counts();
    fake_verbs::hold_sends(true);
    for (uint64_t i = 0; i < 400; ++i) pair.producer->write(source, i * source.size(), {}, i);
    CHECK(fake_verbs::counts().writes + fake_verbs::counts().sends == 16);
    fake_verbs::hold_sends(false);
    CHECK(pair.wait_written(400));
    CHECK(pair.wait_landed(400));
    const auto counts = fake_verbs::counts();
    CHECK(counts.writes == 400);
    CHECK(counts.sends == 400);
    CHECK(counts.inlined == 400);
    CHECK(counts.signalled == counts.lists);
    CHECK(counts.signalled < 150);
    CHECK(counts.registrations == 0);
  }

  TEST_CASE("large writes are striped over rails, small ones spread") {
    reset_world();
    VerbsPair pair;
    pair.start();
    const Bytes source = random_bytes(4u << 20, 1);
    pair.producer->write(source, 0, {}, 1);
    CHECK(pair.wait_landed(1));
    CHECK(pair.wait_written(1));  // what is not acknowledged counts where the small ones go
    CHECK(fake_verbs::bytes_sent("p0", 1) > (2u << 20) - 8192);
    CHECK(fake_verbs::bytes_sent("p1", 1) > (2u << 20) - 8192);
    CHECK(std::equal(source.begin(), source.end(), pair.arena.data()));
    fake_verbs::hold_sends(true);
    for (uint64_t i = 0; i < 8; ++i) pair.producer->write({source.data(), 100'000}, 0, {}, 2 + i);
    fake_verbs::hold_sends(false);
    CHECK(pair.wait_landed(9));
    CHECK(fake_verbs::bytes_sent("p0", 1) > (2u << 20) + 390'000);
    CHECK(fake_verbs::bytes_sent("p1", 1) > (2u << 20) + 390'000);
  }

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
      run_traffic(pair, 300, 1u << 20, [&](uint32_t id) {
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
      return pair.consumer->describe().find("failover") != std::string::npos &&
             pair.producer->describe().find("failover") != std::string::npos;
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
    run_traffic(pair);
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
    run_traffic(pair, 200, 1u << 20, [&](uint32_t id) {
      if (id % 20 == 3) fake_verbs::fail_calls("post_send", ENOMEM, static_cast<int>(id % 5), 3);
    });
  }

  TEST_CASE("an adapter that refuses a work request for another reason loses the path") {
    reset_world();
    VerbsPair pair;
    run_traffic(pair, 200, 1u << 20, [&](uint32_t id) {
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

  TEST_CASE("libraries and devices that are not there") {
    reset_world();
    IoThreads threads(1);
    VerbsOptions options = options_for(true);
    const auto refused = [&](StatusCode code, const std::string& text) {
      try {
        const VerbsFabric fabric(threads, options);
        FAIL("it was opened");
      } catch (const Error& error) {
        CHECK(error.code() == code);
        CHECK_MESSAGE(std::string(error.what()).find(text) != std::string::npos, error.what());
      }
    };
    options.library = "/nowhere/libibverbs.so.1";
    refused(StatusCode::kNoResources, "KVXFER_VERBS_LIBRARY");
    options.library = "libm.so.6";
    refused(StatusCode::kNoResources, "no function ibv_get_device_list");
    options.library = fake_verbs::library_path();
    options.devices = {"mlx5_7"};
    refused(StatusCode::kInvalid, "there is c0, c1, p0, p1");
    options.devices = {"c0:2"};
    refused(StatusCode::kInvalid, "no port 2");
    options.devices = {"c0:x"};
    refused(StatusCode::kInvalid, "NAME:PORT");
    options.devices = {"c0"};
    options.gid_index = 9;
    refused(StatusCode::kNoResources, "no GID at index 9");
    options.gid_index = -1;
    options.timeout = 32;
    refused(StatusCode::kInvalid, "timeout");
    options.timeout = 16;
    fake_verbs::set_port("c0", 1, false);
    refused(StatusCode::kNoResources, "c0:1: not active");
    reset_world({});
    options.devices.clear();
    refused(StatusCode::kNoResources, "there is no RDMA device");
  }

  TEST_CASE("memory of a GPU is registered through its dma-buf, with its offset") {
    reset_world(two_hosts_with([](auto& device) { device.max_mr_size = 1u << 20; }));
    IoThreads threads(1);
    VerbsFabric fabric(threads, options_for(true));
    Bytes memory(3u << 20);
    const auto registered = fabric.register_dmabuf(42, 8192, memory, VerbsAccess::kArena);
    const auto last = fake_verbs::last_registration();
    CHECK(last.fd == 42);
    CHECK(last.offset == 8192 + (2u << 20));
    CHECK(last.length == 1u << 20);
    CHECK(last.iova == reinterpret_cast<uint64_t>(memory.data()) + (2u << 20));
    CHECK(last.access == (1u | 2u | 1u << 20));
    CHECK(fake_verbs::counts().registrations == 2 * 3);
    fake_verbs::fail_calls("reg_dmabuf_mr", EOPNOTSUPP);
    CHECK_THROWS_AS(fabric.register_dmabuf(42, 0, memory, VerbsAccess::kArena), Error);
    CHECK_THROWS_AS(fabric.register_dmabuf(-1, 0, memory, VerbsAccess::kArena), Error);
  }

  TEST_CASE("relaxed ordering can be switched off, and sources are not for peers") {
    reset_world();
    IoThreads threads(1);
    VerbsOptions options = options_for(true);
    options.relaxed_ordering = false;
    VerbsFabric fabric(threads, options);
    Bytes memory(8192);
    {
      const auto source = fabric.register_memory(memory, VerbsAccess::kSource);
      CHECK(fake_verbs::last_registration().access == 0);
    }
    const auto arena = fabric.register_memory(memory, VerbsAccess::kArena);
    CHECK(fake_verbs::last_registration().access == 3);
  }

  TEST_CASE("InfiniBand is addressed by LID") {
    reset_world(two_hosts_with([](auto& device) {
      static uint16_t lid = 10;
      device.ports[0].infiniband = true;
      device.ports[0].lid = lid++;
      device.ports[0].gids = {{0, "fe80::" + std::to_string(lid)}};
    }));
    VerbsPair pair;
    CHECK(pair.consumer_fabric->rails()[0].link_layer == "InfiniBand");
    run_traffic(pair, 50);
  }

  TEST_CASE("eight adapters") {
    std::vector<fake_verbs::Device> devices;
    VerbsOptions consumer = options_for(true), producer = options_for(false);
    consumer.devices.clear();
    producer.devices.clear();
    for (int i = 0; i < 16; ++i) {
      fake_verbs::Device device;
      device.name = (i < 8 ? "c" : "p") + std::to_string(i % 8);
      fake_verbs::Port port;
      port.gids = {{2, "::ffff:10.0." + std::to_string(i % 8) + "." + std::to_string(i / 8 + 1)}};
      device.ports.push_back(port);
      (i < 8 ? consumer : producer).devices.push_back(device.name);
      devices.push_back(device);
    }
    reset_world(devices);
    VerbsPair pair(consumer, producer, 32u << 20);
    CHECK(pair.producer_fabric->rails()[7].mbit_per_second == 400'000);
    run_traffic(pair, 60, 4u << 20);
    for (int i = 0; i < 8; ++i) {
      CHECK(fake_verbs::bytes_sent("p" + std::to_string(i), 1) > (10u << 20));
    }
  }

  TEST_CASE("rails of different speeds carry bytes in proportion") {
    reset_world(two_hosts_with([](auto& device) {
      if (device.name == "c1") device.ports[0].speed = 32;  // 4 lanes of 25 instead of 100 Gbit/s
    }));
    VerbsPair pair;
    pair.start();
    CHECK(pair.producer->rate().value() == 62.5e9);
    const Bytes source = random_bytes(5u << 20, 1);
    pair.producer->write(source, 0, {}, 1);
    CHECK(pair.wait_landed(1));
    CHECK(std::equal(source.begin(), source.end(), pair.arena.data()));
    CHECK(fake_verbs::bytes_sent("p0", 1) > (4u << 20) - 8192);
    CHECK(fake_verbs::bytes_sent("p1", 1) > (1u << 20) - 8192);
    CHECK(pair.wait_written(1));
    fake_verbs::hold_sends(true);
    for (uint64_t i = 0; i < 10; ++i) pair.producer->write({source.data(), 100'000}, 0, {}, 2 + i);
    fake_verbs::hold_sends(false);
    CHECK(pair.wait_landed(11));
    CHECK(fake_verbs::bytes_sent("p0", 1) < (4u << 20) + 850'000);
    CHECK(fake_verbs::bytes_sent("p1", 1) > (1u << 20) + 150'000);
  }

  TEST_CASE("peers without a common kind of address are refused, with both lists") {
    reset_world(two_hosts_with([](auto& device) {
      if (device.name[0] == 'c') device.ports[0].gids = {{2, "::ffff:10.0.0.1"}};
      if (device.name[0] == 'p') device.ports[0].gids = {{2, "2001:db8::1"}};
    }));
    try {
      const VerbsPair pair;
      FAIL("it was connected");
    } catch (const Error& error) {
      CHECK(error.code() == StatusCode::kUnreachable);
      CHECK(std::string(error.what()).find("2001:db8::1") != std::string::npos);
    }
    CHECK(fake_verbs::objects().total() == 0);
  }

  TEST_CASE("addresses that are garbage are refused") {
    reset_world();
    IoThreads threads(1);
    const VerbsFabric fabric(threads, options_for(false));
    const VerbsFabric other(threads, options_for(true));
    Bytes memory(1u << 20);
    VerbsFabric arena_fabric(threads, options_for(true));
    const auto arena = arena_fabric.register_memory(memory, VerbsAccess::kArena);
    const Bytes good = VerbsEndpoint(arena_fabric, arena).address();
    const auto connect = [&](const Bytes& address) {
      const auto [a, b] = tcp_pair(false);
      ::close(b);
      make_verbs_link(threads, a, VerbsEndpoint(fabric, nullptr), address);
    };
    CHECK_NOTHROW(connect(good));
    for (size_t size = 0; size < good.size(); ++size) {
      CHECK_THROWS_AS(connect(Bytes(good.begin(), good.begin() + static_cast<ptrdiff_t>(size))),
                      Error);
    }
    Bytes longer = good;
    longer.emplace_back();
    CHECK_THROWS_AS(connect(longer), Error);
    // Flipped bytes are refused or are another address; they do no harm here.
    for (size_t at = 0; at < good.size(); ++at) {
      Bytes flipped = good;
      flipped[at] ^= std::byte{0xff};
      try {
        connect(flipped);
      } catch (const Error&) {
      }
    }
    CHECK_THROWS_AS(connect(VerbsEndpoint(fabric, nullptr).address()), Error);  // no arena at all
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
