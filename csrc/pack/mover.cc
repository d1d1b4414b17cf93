#include "pack/mover.h"

#include <algorithm>
#include <cstring>

#include "layout/run_cursor.h"

namespace kvxfer {
namespace {

// When gathering, long runs are cut so that prefetching looks kAhead of these ahead: that should
// reach over the end of a run of 16 KiB, and for runs of 256 bytes not further than the first
// cache. When scattering, each cut may fall into a cache line that then is not streamed.
template <Direction kDirection>
constexpr size_t kSegmentBytes = (kDirection == Direction::kGather ? 64 : 1024) * kStripe;

// Small enough that a piece is still in the first cache level when it is digested.
constexpr size_t kPieceBytes = 4096;

constexpr size_t kRuns = 64;

// A constant size lets the compiler use single loads and stores.
template <size_t kBytes>
void copy_exactly(std::byte* to, const std::byte* from) {
  std::memcpy(to, from, kBytes);
}

void copy_small(std::byte* to, const std::byte* from, size_t bytes) {
  switch (bytes) {
    case 1: return copy_exactly<1>(to, from);
    case 2: return copy_exactly<2>(to, from);
    case 4: return copy_exactly<4>(to, from);
    case 8: return copy_exactly<8>(to, from);
    case 16: return copy_exactly<16>(to, from);
    case 32: return copy_exactly<32>(to, from);
    default: std::memcpy(to, from, bytes);
  }
}

}  // namespace

template <Direction kDirection>
Mover<kDirection>::Mover(Wire wire, bool with_digest, bool stream)
    : kernels_(stripe_kernels()), wire_(wire), with_digest_(with_digest), stream_(stream) {}

template <Direction kDirection>
Digest Mover<kDirection>::run(const CopyPlan& plan, uint64_t begin, uint64_t end, uint64_t seed) {
  RunCursor cursor(plan, begin, end);
  std::array<Run, kRuns> runs;
  while (const size_t count = cursor.fill(runs)) {
    for (size_t i = 0; i < count; ++i) {
      const bool whole_stripes = runs[i].bytes % kStripe == 0;
      if (whole_stripes && digested_ == at_) {
        add_run(runs[i]);
      } else {
        flush();
        move_pieces(runs[i]);
      }
    }
  }
  flush();
  if (!with_digest_) return Digest{};
  return finish_digest(state_, wire_ + digested_, at_ - digested_, at_, seed);
}

template <Direction kDirection>
void Mover<kDirection>::add_run(const Run& run) {
  for (uint64_t i = 0; i < run.count; ++i) {
    std::byte* piece = run.address + static_cast<int64_t>(i) * run.stride;
    for (uint64_t done = 0; done < run.bytes; done += kSegmentBytes<kDirection>) {
      add_piece(piece + done, std::min<uint64_t>(kSegmentBytes<kDirection>, run.bytes - done));
    }
  }
}

template <Direction kDirection>
void Mover<kDirection>::add_piece(std::byte* memory, size_t bytes) {
  if (held_ == segments_.size()) {
    move_segments(kCapacity);
    std::copy(segments_.begin() + kCapacity, segments_.end(), segments_.begin());
    held_ = kAhead;
  }
  if constexpr (kDirection == Direction::kGather) {
    segments_[held_++] = {wire_ + at_, memory, bytes / kStripe};
  } else {
    segments_[held_++] = {memory, wire_ + at_, bytes / kStripe};
  }
  at_ += bytes;
  digested_ = at_;
}

template <Direction kDirection>
void Mover<kDirection>::move_segments(size_t count) {
  const MoveSegments move = stream_ ? (with_digest_ ? kernels_.stream_digest : kernels_.stream)
                                    : (with_digest_ ? kernels_.copy_digest : kernels_.copy);
  move(segments_.data(), count, kDirection == Direction::kGather ? kAhead : 0, state_);
}

template <Direction kDirection>
void Mover<kDirection>::flush() {
  if (held_ == 0) return;
  // The kernels look kAhead segments further than they move.
  const size_t ready = std::min(held_, kCapacity);
  const size_t rest = held_ - ready;
  std::fill(segments_.begin() + static_cast<std::ptrdiff_t>(held_), segments_.end(), Segment{});
  move_segments(ready);
  if (rest > 0) {
    std::copy(segments_.begin() + kCapacity, segments_.end(), segments_.begin());
    std::fill(segments_.begin() + kAhead, segments_.begin() + 2 * kAhead, Segment{});
    move_segments(rest);
  }
  held_ = 0;
}

template <Direction kDirection>
void Mover<kDirection>::move_pieces(const Run& run) {
  for (uint64_t i = 0; i < run.count; ++i) {
    std::byte* piece = run.address + static_cast<int64_t>(i) * run.stride;
    for (uint64_t done = 0; done < run.bytes; done += kPieceBytes) {
      move_piece(piece + done, std::min<uint64_t>(kPieceBytes, run.bytes - done));
    }
  }
  digest_moved();
}

template <Direction kDirection>
void Mover<kDirection>::move_piece(std::byte* memory, size_t bytes) {
  if constexpr (kDirection == Direction::kGather) {
    copy_small(wire_ + at_, memory, bytes);
  } else {
    copy_small(memory, wire_ + at_, bytes);
  }
  at_ += bytes;
  if (at_ - digested_ >= kPieceBytes) digest_moved();
}

template <Direction kDirection>
void Mover<kDirection>::digest_moved() {
  const size_t stripes = (at_ - digested_) / kStripe;
  if (with_digest_) kernels_.digest(wire_ + digested_, stripes, state_);
  digested_ += stripes * kStripe;
}

template class Mover<Direction::kGather>;
template class Mover<Direction::kScatter>;

}  // namespace kvxfer
