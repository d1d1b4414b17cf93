// Writes from any registered memory into any of the peer's, over adapters with narrow limits.

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <set>

#include "kvxfer/status.h"
#include "verbs_pair.h"

namespace kvxfer::testing {
namespace {

constexpr std::byte kPoison{0xee};

// Memory of which only some parts are registered.
struct Parts {
  explicit Parts(uint32_t seed) : memory(random_bytes(1u << 20, seed)) {
    for (const auto& [begin, size] : {std::pair<size_t, size_t>{1000, 200'000},
                                      {300'001, 99'999},
                                      {500'000, 4096},
                                      {600'000, 400'000}}) {
      spans.push_back(std::span(memory).subspan(begin, size));
    }
  }

  Bytes memory;
  std::vector<std::span<std::byte>> spans;
};

// Pieces that do not overlap in `to`.
std::vector<DirectPiece> draw_pieces(std::mt19937& random, const Parts& from, const Parts& to) {
  std::vector<DirectPiece> pieces;
  for (const auto& target : to.spans) {
    for (size_t at = random() % 100; at < target.size();) {
      const auto& source = from.spans[random() % from.spans.size()];
      const size_t into = random() % source.size();
      const size_t most = std::min(source.size() - into, target.size() - at);
      const size_t bytes = 1 + random() % std::min<size_t>(most, random() % 2 ? 64 : 150'000);
      pieces.push_back({source.data() + into,
                        static_cast<uint64_t>(target.data() + at - to.spans[0].data()), bytes});
      at += bytes + random() % 3000;
    }
  }
  std::shuffle(pieces.begin(), pieces.end(), random);
  return pieces;
}

void narrow(uint64_t max_mr_size, int max_qp_wr) {
  auto devices = two_hosts();
  for (auto& device : devices) {
    device.max_mr_size = max_mr_size;
    device.max_qp_wr = max_qp_wr;
  }
  reset_world(devices);
}

TEST_SUITE("verbs direct" * doctest::skip(real_devices() != nullptr)) {
  TEST_CASE("pieces land where they belong and nowhere else, whatever one registration holds") {
    SUBCASE("everything") { narrow(~uint64_t{0}, 1024); }
    SUBCASE("less than an array") { narrow(70'000, 1024); }
    SUBCASE("the same, and few work requests") { narrow(70'000, 3); }
    std::mt19937 random(5);
    VerbsPair pair;
    pair.start();
    Parts from(1), to(2);
    std::fill(to.memory.begin(), to.memory.end(), kPoison);
    const auto source = pair.producer->register_memory(from.spans, Link::DirectUse::kSource);
    const auto target = pair.consumer->register_memory(to.spans, Link::DirectUse::kTarget);
    const auto remote = pair.producer->remote_memory(target->keys());
    Bytes expected = to.memory;
    constexpr uint64_t kWrites = 6;
    for (uint64_t i = 0; i < kWrites; ++i) {
      std::fill(to.memory.begin(), to.memory.end(), kPoison);
      std::fill(expected.begin(), expected.end(), kPoison);
      const auto pieces = draw_pieces(random, from, to);
      for (const DirectPiece& piece : pieces) {
        std::memcpy(&expected[1000 + piece.offset], piece.source, piece.bytes);
      }
      pair.producer->write_direct(pieces, source, remote, random_bytes(50, 3), i);
      REQUIRE(pair.wait_landed(i + 1));
      REQUIRE(pair.wait_written(i + 1));
      CHECK(to.memory == expected);
    }
    for (const auto& written : pair.producer_sink.written) CHECK(written.ok);
  }

  TEST_CASE("a piece beyond what is registered ends the link, and nothing of the write lands") {
    reset_world();
    for (const int beyond : {0, 1, 2, 3}) {
      VerbsPair pair;
      pair.start();
      Parts from(1), to(2);
      std::fill(to.memory.begin(), to.memory.end(), kPoison);
      const auto source = pair.producer->register_memory(from.spans, Link::DirectUse::kSource);
      const auto target = pair.consumer->register_memory(to.spans, Link::DirectUse::kTarget);
      const auto remote = pair.producer->remote_memory(target->keys());
      std::vector<DirectPiece> pieces{{from.spans[0].data(), 0, 4096}};
      if (beyond == 0) pieces.push_back({from.spans[0].data(), 199'999, 2});
      if (beyond == 1) pieces.push_back({from.spans[0].data() + 199'999, 0, 2});
      if (beyond == 2) pieces.push_back({from.spans[0].data() + 200'000, 0, 1});
      if (beyond == 3) pieces.push_back({from.spans[0].data(), UINT64_MAX, 1});
      pair.producer->write_direct(pieces, source, remote, {}, 7);
      REQUIRE(pair.wait_written(1));
      CHECK(!pair.producer_sink.written[0].ok);
      pair.close();
      CHECK(std::count(to.memory.begin(), to.memory.end(), kPoison) ==
            static_cast<std::ptrdiff_t>(to.memory.size()));
    }
  }

  TEST_CASE("a registration that has gone is written into by nobody") {
    reset_world();
    VerbsPair pair;
    pair.start();
    Parts from(1), to(2);
    std::fill(to.memory.begin(), to.memory.end(), kPoison);
    const auto source = pair.producer->register_memory(from.spans, Link::DirectUse::kSource);
    auto target = pair.consumer->register_memory(to.spans, Link::DirectUse::kTarget);
    const auto remote = pair.producer->remote_memory(target->keys());
    const std::vector<DirectPiece> pieces{{from.spans[0].data(), 0, 4096}};
    pair.producer->write_direct(pieces, source, remote, {}, 1);
    REQUIRE(pair.wait_landed(1));
    CHECK(to.memory[1000] == from.memory[1000]);  // the control
    to.memory[1000] = kPoison;
    target.reset();
    pair.producer->write_direct(pieces, source, remote, {}, 2);
    REQUIRE(pair.wait_written(2));
    CHECK(!pair.producer_sink.written[1].ok);
    pair.close();
    CHECK(to.memory[1000] == kPoison);
    CHECK(fake_verbs::counts().violations > 0);
    fake_verbs::clear_counts();
  }

  TEST_CASE("where peers have memory is drawn anew each time, but for its place in a page") {
    reset_world();
    VerbsPair pair;
    Parts to(2);
    const auto own = reinterpret_cast<uint64_t>(to.spans[0].data());
    std::set<uint64_t> seen{own};
    for (int i = 0; i < 8; ++i) {
      const Bytes keys = pair.consumer->register_memory(to.spans, Link::DirectUse::kTarget)->keys();
      uint64_t base = 0;
      std::memcpy(&base, &keys[4], sizeof(base));
      CHECK(seen.insert(base).second);
      CHECK((base - own) % (2u << 20) == 0);
    }
  }

  TEST_CASE("damaged keys are refused, or reach no further than they say") {
    reset_world();
    VerbsPair pair;
    Parts to(2);
    const auto target = pair.consumer->register_memory(to.spans, Link::DirectUse::kTarget);
    const Bytes keys = target->keys();
    CHECK_NOTHROW(pair.producer->remote_memory(keys));
    for (size_t size = 0; size < keys.size(); ++size) {
      CHECK_THROWS_AS(pair.producer->remote_memory(std::span(keys).first(size)), Error);
    }
    // Pieces of a byte, and so many of them that their sum would begin anew.
    Bytes endless = keys;
    std::memset(&endless[4], 0, 16);
    endless[12] = std::byte{1};
    std::memset(&endless[24 + 3 * 16 + 8], 0xff, 8);
    CHECK_THROWS_AS(pair.producer->remote_memory(endless), Error);
    Bytes longer = keys;
    longer.push_back(std::byte{0});
    CHECK_THROWS_AS(pair.producer->remote_memory(longer), Error);
    std::mt19937 random(1);
    for (int i = 0; i < 20'000; ++i) {
      Bytes changed = keys;
      for (int change = 0; change < 3; ++change) {
        changed[random() % changed.size()] = static_cast<std::byte>(random());
      }
      try {
        pair.producer->remote_memory(changed);
      } catch (const Error& error) {
        REQUIRE(error.code() == StatusCode::kProtocol);
      }
    }
  }
}

}  // namespace
}  // namespace kvxfer::testing
