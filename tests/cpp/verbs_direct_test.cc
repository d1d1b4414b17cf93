// Writes from any registered memory into any of the peer's, over adapters with narrow limits.

#include <doctest/doctest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
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

  std::vector<DirectSpan> pieces() const {
    std::vector<DirectSpan> all;
    for (const auto& span : spans) all.push_back({span});
    return all;
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

// What stands for memory of a GPU: addresses that nobody can read, and a descriptor of what is
// there.
struct OutOfReach {
  static constexpr size_t kSize = 5u << 20, kLead = 8192;

  OutOfReach()
      : fd(::memfd_create("out-of-reach", MFD_CLOEXEC)),
        address(static_cast<std::byte*>(
            ::mmap(nullptr, kSize, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {
    REQUIRE(::ftruncate(fd, kLead + kSize) == 0);
  }
  ~OutOfReach() {
    ::munmap(address, kSize);
    ::close(fd);
  }

  // From `begin` on, by the descriptor or by the address alone.
  DirectSpan span(size_t begin, size_t size, bool by_dmabuf = true) const {
    if (!by_dmabuf) return {{address + begin, size}, true};
    return {{address + begin, size}, true, fd, kLead + begin};
  }
  Bytes read(size_t begin, size_t size) const {
    Bytes bytes(size);
    REQUIRE(::pread(fd, bytes.data(), size, static_cast<off_t>(kLead + begin)) ==
            static_cast<ssize_t>(size));
    return bytes;
  }

  const int fd;
  std::byte* const address;
};

std::string refusal(Link& link, const DirectSpan& span) {
  try {
    link.register_memory({&span, 1}, Link::DirectUse::kTarget);
  } catch (const Error& error) {
    CHECK(error.code() == StatusCode::kNoResources);
    return error.what();
  }
  return "";
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
    const auto source = pair.producer->register_memory(from.pieces(), Link::DirectUse::kSource);
    const auto target = pair.consumer->register_memory(to.pieces(), Link::DirectUse::kTarget);
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

  TEST_CASE("pieces go on over borders between registrations that touch, on either side") {
    SUBCASE("in whole") { narrow(~uint64_t{0}, 1024); }
    SUBCASE("in pieces") { narrow(8192, 3); }
    std::mt19937 random(6);
    VerbsPair pair;
    pair.start();
    Bytes from = random_bytes(200'000, 1), to(200'000, kPoison);
    const auto cut = [&](Bytes& memory) {
      std::vector<DirectSpan> spans;
      for (size_t at = 100; at < memory.size() - 100;) {
        const size_t bytes = std::min(1 + random() % 40'000, memory.size() - 100 - at);
        spans.push_back({std::span(memory).subspan(at, bytes)});
        at += bytes;
      }
      return spans;
    };
    const auto source = pair.producer->register_memory(cut(from), Link::DirectUse::kSource);
    const auto target = pair.consumer->register_memory(cut(to), Link::DirectUse::kTarget);
    const auto remote = pair.producer->remote_memory(target->keys());
    Bytes expected = to;
    const std::vector<DirectPiece> pieces{{&from[100], 1000, 150'000}, {&from[50'000], 160'000, 9}};
    for (const DirectPiece& piece : pieces) {
      std::memcpy(&expected[100 + piece.offset], piece.source, piece.bytes);
    }
    pair.producer->write_direct(pieces, source, remote, random_bytes(50, 3), 1);
    REQUIRE(pair.wait_landed(1));
    REQUIRE(pair.wait_written(1));
    CHECK(to == expected);
    // What is behind the last one is still not theirs.
    pair.producer->write_direct({{&from[199'890], 0, 11}}, source, remote, {}, 2);
    REQUIRE(pair.wait_written(2));
    CHECK(!pair.producer_sink.written[1].ok);
    pair.close();
    CHECK(to == expected);
  }

  TEST_CASE("a piece beyond what is registered ends the link, and nothing of the write lands") {
    reset_world();
    for (const int beyond : {0, 1, 2, 3}) {
      VerbsPair pair;
      pair.start();
      Parts from(1), to(2);
      std::fill(to.memory.begin(), to.memory.end(), kPoison);
      const auto source = pair.producer->register_memory(from.pieces(), Link::DirectUse::kSource);
      const auto target = pair.consumer->register_memory(to.pieces(), Link::DirectUse::kTarget);
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
    const auto source = pair.producer->register_memory(from.pieces(), Link::DirectUse::kSource);
    auto target = pair.consumer->register_memory(to.pieces(), Link::DirectUse::kTarget);
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
      const Bytes keys =
          pair.consumer->register_memory(to.pieces(), Link::DirectUse::kTarget)->keys();
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
    const auto target = pair.consumer->register_memory(to.pieces(), Link::DirectUse::kTarget);
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

  TEST_CASE("adapters reach memory of a GPU by its dma-buf, in pieces, each through itself") {
    narrow(1u << 20, 1024);
    VerbsPair pair;
    pair.start();
    OutOfReach gpu;
    constexpr size_t kBegin = 4608, kSize = (3u << 20) - 100;
    const DirectSpan span = gpu.span(kBegin, kSize);
    fake_verbs::clear_counts();
    const auto memory = pair.consumer->register_memory({&span, 1}, Link::DirectUse::kTarget);
    const auto last = fake_verbs::last_registration();
    CHECK(last.fd == gpu.fd);
    CHECK(last.offset == OutOfReach::kLead + kBegin + (2u << 20));
    CHECK(last.length == kSize - (2u << 20));
    CHECK(last.iova % (2u << 20) == reinterpret_cast<uint64_t>(gpu.address + kBegin) % (2u << 20));
    CHECK(last.access == (1u | 2u | 1u << 20));
    REQUIRE(memory->adapters() == 2);
    CHECK(fake_verbs::counts().registrations == 2 * 3);
    CHECK(memory->adapter_name(1) == "c1");
    for (size_t adapter = 0; adapter < 2; ++adapter) {
      // Over the end of a piece, too.
      for (const size_t at : {size_t{0}, (1u << 20) - size_t{100}, kSize - 200}) {
        const Bytes bytes = random_bytes(200, static_cast<uint32_t>(at + adapter));
        memory->put(adapter, gpu.address + kBegin + at, bytes, 5);
        CHECK(gpu.read(kBegin + at, 200) == bytes);
        Bytes back(200);
        memory->get(adapter, gpu.address + kBegin + at, back, 5);
        CHECK(back == bytes);
      }
    }
    CHECK(gpu.read(0, kBegin) == Bytes(kBegin));
    CHECK(gpu.read(kBegin + kSize, 1000) == Bytes(1000));
    CHECK_THROWS_AS(memory->put(0, gpu.address + kBegin + kSize - 10, Bytes(20), 5), Error);
    CHECK(fake_verbs::counts().violations == 0);
  }

  TEST_CASE("an adapter that does not answer itself is given up, and asked anew the next time") {
    reset_world();
    VerbsPair pair;
    pair.start();
    OutOfReach gpu;
    const DirectSpan span = gpu.span(0, 4096);
    const auto memory = pair.consumer->register_memory({&span, 1}, Link::DirectUse::kTarget);
    const Bytes bytes(64, std::byte{7});
    const auto problem = [&](double seconds) -> std::string {
      try {
        memory->put(0, gpu.address, bytes, seconds);
      } catch (const Error& error) {
        return error.what();
      }
      return "";
    };
    fake_verbs::hold_sends(true);
    CHECK(problem(0.05).find("'c0', to itself: no completion in time") != std::string::npos);
    fake_verbs::hold_sends(false);
    CHECK(gpu.read(0, 64) == Bytes(64));  // nor does it come late
    fake_verbs::set_port("c0", 1, false);
    CHECK(problem(5).find("'c0' has no active port") != std::string::npos);
    fake_verbs::set_port("c0", 1, true);
    CHECK(problem(5).empty());
    CHECK(gpu.read(0, 64) == bytes);
  }

  TEST_CASE("memory of a GPU that cannot be registered: what it says, by what the kernel said") {
    reset_world();
    VerbsPair pair;
    pair.start();
    const OutOfReach gpu;
    const auto found = [&](bool by_dmabuf, int error, const std::string& text) {
      if (error != 0) fake_verbs::fail_calls(by_dmabuf ? "reg_dmabuf_mr" : "reg_mr", error);
      const std::string said = refusal(*pair.consumer, gpu.span(0, 4096, by_dmabuf));
      CAPTURE(said);
      return said.find(text) != std::string::npos && said.find("'c0'") != std::string::npos;
    };
    for (const int error : {EOPNOTSUPP, ENOSYS, EPROTONOSUPPORT}) {
      CHECK(found(true, error, "cannot register dma-bufs"));
    }
    for (const int error : {EINVAL, EFAULT, ENXIO}) {
      CHECK(found(true, error, "CONFIG_DMABUF_MOVE_NOTIFY and CONFIG_PCI_P2PDMA"));
    }
    for (const int error : {EINVAL, EFAULT}) CHECK(found(false, error, "nvidia-peermem"));
    CHECK(found(false, 0, "nvidia-peermem"));  // what a kernel without one says
    for (const bool by_dmabuf : {false, true}) {
      CHECK(found(by_dmabuf, ENOMEM, "BAR may be too small"));
      CHECK(found(by_dmabuf, EPERM, "limits of its container"));
    }
    CHECK(found(true, EBADF, "given up the dma-buf"));
    CHECK(found(false, EBUSY, "has refused it"));
    CHECK(refusal(*pair.consumer, gpu.span(0, 4096)).empty());
    CHECK(fake_verbs::counts().violations == 0);
  }
}

}  // namespace
}  // namespace kvxfer::testing
