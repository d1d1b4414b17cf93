#include <doctest/doctest.h>

#include <cstring>
#include <random>
#include <vector>

#include "base/digest_kernels.h"
#include "kvxfer/digest.h"
#include "kvxfer/status.h"

namespace kvxfer {
namespace {

std::vector<std::byte> random_bytes(size_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

bool same(const DigestState& a, const DigestState& b) {
  return a.sum == b.sum && a.p == b.p && a.q == b.q && a.key == b.key;
}

std::vector<const StripeKernels*> runnable_kernels() {
  std::vector<const StripeKernels*> kernels;
  const std::string before = simd_variant();
  for (const std::string& name : simd_variants()) {
    set_simd_variant(name);
    kernels.push_back(&stripe_kernels());
    CHECK(simd_variant() == name);
  }
  set_simd_variant(before);
  return kernels;
}

TEST_CASE("digest: every variant gives what the scalar one gives") {
  for (const StripeKernels* kernels : runnable_kernels()) {
    CAPTURE(kernels->name);
    for (size_t stripes : {0, 1, 2, 3, 17, 100}) {
      for (size_t offset : {0, 1, 8, 63}) {
        const auto bytes = random_bytes(offset + stripes * kStripe, 3);
        DigestState expected;
        DigestState found;
        kScalarKernels.digest(bytes.data() + offset, stripes, expected);
        kernels->digest(bytes.data() + offset, stripes, found);
        CHECK(same(expected, found));
      }
    }
  }
}

TEST_CASE("digest: moves copy exactly their stripes and digest them") {
  constexpr size_t kStripes[] = {1, 8, 2, 33, 1};
  constexpr size_t kTotal = 45 * kStripe;
  for (const StripeKernels* kernels : runnable_kernels()) {
    for (size_t to_offset : {0, 1, 16, 63}) {
      for (size_t from_offset : {0, 5}) {
        CAPTURE(kernels->name);
        CAPTURE(to_offset);
        const auto source = random_bytes(from_offset + kTotal, 9);
        DigestState expected;
        kScalarKernels.digest(source.data() + from_offset, kTotal / kStripe, expected);
        const auto run = [&](MoveSegments move, bool digests) {
          // Nothing around the target, so that a sanitizer sees a store outside.
          std::vector<std::byte> target(to_offset + kTotal, std::byte{0xee});
          std::vector<Segment> segments;
          size_t at = 0;
          for (const size_t stripes : kStripes) {
            segments.push_back(
                {target.data() + to_offset + at, source.data() + from_offset + at, stripes});
            at += stripes * kStripe;
          }
          const size_t count = segments.size();
          segments.resize(count + 3);
          DigestState state;
          move(segments.data(), count, 3, state);
          CHECK(std::memcmp(target.data() + to_offset, source.data() + from_offset, kTotal) == 0);
          for (size_t i = 0; i < to_offset; ++i) CHECK(target[i] == std::byte{0xee});
          CHECK(same(state, digests ? expected : DigestState{}));
        };
        run(kernels->copy, false);
        run(kernels->copy_digest, true);
        run(kernels->stream, false);
        run(kernels->stream_digest, true);
      }
    }
  }
}

TEST_CASE("digest: the sums of parts add up to the sums of the whole") {
  const auto bytes = random_bytes(20 * kStripe, 4);
  DigestState whole;
  kScalarKernels.digest(bytes.data(), 20, whole);
  DigestState head;
  kScalarKernels.digest(bytes.data(), 7, head);
  DigestState tail;
  tail.key = head.key;
  kScalarKernels.digest(bytes.data() + 7 * kStripe, 13, tail);
  for (size_t lane = 0; lane < kLanes; ++lane) {
    CHECK(head.sum[lane] + tail.sum[lane] == whole.sum[lane]);
    CHECK(head.p[lane] + tail.p[lane] == whole.p[lane]);
    CHECK(head.q[lane] + tail.q[lane] == whole.q[lane]);
  }
}

TEST_CASE("digest: known values on every machine") {
  std::vector<std::byte> bytes(256);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i);
  CHECK(digest({}, 0) == Digest{0, 0xC7B56398C24A4B50});
  CHECK(digest(bytes, 42) == Digest{0x7050300FEFCFAF80, 0x7B225C1A64936BF2});
}

TEST_CASE("digest: a variant that does not exist is refused") {
  CHECK_THROWS_AS(set_simd_variant("mmx"), Error);
}

}  // namespace
}  // namespace kvxfer
