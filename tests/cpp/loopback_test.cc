// The faults of a loopback link, which other tests rely on: each is seen to happen.

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <mutex>

#include "link_pair.h"

namespace kvxfer::testing {
namespace {

TEST_CASE("loopback faults can be seen") {
  const uint32_t kCount = 400;
  // `enough` writes and messages are waited for: what a fault lets through at the least.
  const auto run = [&](const LoopbackFaults& faults, size_t enough_writes, size_t enough_messages,
                       auto check) {
    LinkPair pair("loopback", faults);
    pair.start();
    const Bytes source(64, std::byte{0});
    for (uint32_t i = 0; i < kCount; ++i) {
      Bytes notice(sizeof(i));
      std::memcpy(notice.data(), &i, sizeof(i));
      pair.producer->write(source, i * 64, notice, i);
      pair.producer->send(notice);
    }
    CHECK(pair.producer_sink.written.size() == kCount);
    REQUIRE(pair.consumer_sink.wait([&] {
      return pair.consumer_sink.landed.size() >= enough_writes &&
             pair.consumer_sink.messages.size() >= enough_messages;
    }));
    const std::lock_guard lock(pair.consumer_sink.mutex);
    std::vector<uint32_t> landed;
    for (const auto& write : pair.consumer_sink.landed) {
      uint32_t id;
      std::memcpy(&id, write.notice.data(), sizeof(id));
      landed.push_back(id);
    }
    uint32_t bits = 0;
    for (size_t i = 0; i < kCount * 64; ++i) {
      bits += static_cast<uint32_t>(std::popcount(std::to_integer<uint8_t>(pair.arena.data()[i])));
    }
    check(landed, pair.consumer_sink.messages.size(), bits);
  };
  run({}, kCount, kCount, [&](const auto& landed, size_t messages, uint32_t bits) {
    CHECK(landed.size() == kCount);
    CHECK(std::is_sorted(landed.begin(), landed.end()));
    CHECK(messages == kCount);
    CHECK(bits == 0);
  });
  run({.drop_message = 0.5}, kCount, kCount / 4 + 1, [&](const auto&, size_t messages, uint32_t) {
    CHECK(messages > kCount / 4);
    CHECK(messages < kCount * 3 / 4);
  });
  run({.duplicate_message = 1}, kCount, 2 * kCount,
      [&](const auto&, size_t messages, uint32_t) { CHECK(messages == 2 * kCount); });
  run({.drop_write = 0.5}, kCount / 4 + 1, kCount, [&](const auto& landed, size_t, uint32_t) {
    CHECK(landed.size() > kCount / 4);
    CHECK(landed.size() < kCount * 3 / 4);
  });
  run({.duplicate_write = 0.5}, kCount * 5 / 4 + 1, kCount,
      [&](const auto& landed, size_t, uint32_t) { CHECK(landed.size() > kCount * 5 / 4); });
  run({.reorder_write = 0.5}, kCount, kCount, [&](const auto& landed, size_t, uint32_t) {
    CHECK(landed.size() == kCount);
    CHECK_FALSE(std::is_sorted(landed.begin(), landed.end()));
  });
  run({.corrupt_write = 0.25}, kCount, kCount, [&](const auto& landed, size_t, uint32_t bits) {
    CHECK(landed.size() == kCount);
    CHECK(bits > kCount / 8);
    CHECK(bits < kCount / 2);
  });
  run({.delay_us = 5000}, kCount, kCount, [&](const auto& landed, size_t, uint32_t) {
    CHECK(landed.size() == kCount);
    CHECK_FALSE(std::is_sorted(landed.begin(), landed.end()));
  });
}

}  // namespace
}  // namespace kvxfer::testing
