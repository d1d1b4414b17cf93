// Adapters of other kinds, sizes and speeds than the usual ones, and none at all.

#include <unistd.h>

#include <doctest/doctest.h>

#include <algorithm>
#include <cerrno>

#include "kvxfer/status.h"
#include "verbs_pair.h"

namespace kvxfer::testing {
namespace {

TEST_SUITE("verbs adapters" * doctest::skip(real_devices() != nullptr)) {
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
    check_traffic(pair, 120);
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
    check_traffic(pair, 50);
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
    check_traffic(pair, 60, 4u << 20);
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
      CHECK(std::string(error.what()).find("verbs_near='any'") != std::string::npos);
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
}

}  // namespace
}  // namespace kvxfer::testing
