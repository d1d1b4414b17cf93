#include "pack/gpu_raw_table.h"

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>
#include <string>

#include "base/digest_kernels.h"
#include "kvxfer/status.h"
#include "layout/run_cursor.h"

namespace kvxfer::gpu {
namespace {

constexpr uint64_t kMostPieceBytes = 1 << 20;
constexpr uint64_t kMostChunkBytes = 1 << 30;
constexpr size_t kRuns = 64;

// Largest divisor of `bytes` that a piece may have.
uint64_t limit_piece(uint64_t bytes) {
  for (uint64_t factor = 2; bytes > kMostPieceBytes;) {
    if (bytes % factor == 0) {
      bytes /= factor;
    } else {
      ++factor;
    }
  }
  return bytes;
}

template <class Visit>
void for_each_run(const CopyPlan& plan, uint64_t begin, uint64_t end, Visit visit) {
  RunCursor cursor(plan, begin, end);
  std::array<Run, kRuns> runs;
  while (const size_t count = cursor.fill(runs)) {
    for (size_t i = 0; i < count; ++i) visit(runs[i]);
  }
}

}  // namespace

Divider make_divider(uint32_t divisor) {
  const auto bits = static_cast<uint32_t>(std::bit_width(divisor - 1));
  const uint32_t shift = 31 + bits;
  return {static_cast<uint32_t>((uint64_t{1} << shift) / divisor + 1), shift};
}

RawTable::RawTable(const CopyPlan& plan, uint64_t begin, uint64_t end) : begin_(begin) {
  uint64_t common = 0;
  uint64_t alignment = 16;
  for_each_run(plan, begin, end, [&](const Run& run) {
    common = std::gcd(common, run.bytes);
    alignment |= reinterpret_cast<uintptr_t>(run.address);
    if (run.count > 1) alignment |= static_cast<uint64_t>(run.stride);
  });
  if (common == 0) return;
  const uint64_t piece = limit_piece(common);
  alignment_ = uint64_t{1} << std::countr_zero(alignment | piece);
  piece_bytes_ = static_cast<uint32_t>(piece);
  divider_ = make_divider(piece_bytes_);
  pieces_.reserve((end - begin) / piece);
  for_each_run(plan, begin, end, [&](const Run& run) {
    for (uint64_t i = 0; i < run.count; ++i) {
      const uint64_t begin = reinterpret_cast<uintptr_t>(run.address) +
                             static_cast<uint64_t>(static_cast<int64_t>(i) * run.stride);
      for (uint64_t done = 0; done < run.bytes; done += piece) pieces_.push_back(begin + done);
    }
  });
}

uint32_t RawTable::width(uint64_t begin, uint64_t end) const {
  const uint64_t all = alignment_ | (begin - begin_) | (end - begin_);
  return all % 16 == 0 ? 16 : all % 4 == 0 ? 4 : 1;
}

RawChunk RawTable::chunk(uint64_t begin, uint64_t end, uint64_t wire,
                         uint64_t device_pieces) const {
  const uint64_t all = pieces_.size() * uint64_t{piece_bytes_};
  if (begin < begin_ || begin > end || end > begin_ + all || end - begin >= kMostChunkBytes ||
      wire % 16 != 0) {
    throw Error(StatusCode::kInvalid,
                "a chunk of wire bytes [" + std::to_string(begin) + ", " + std::to_string(end) +
                    ") at address " + std::to_string(wire) +
                    " cannot be moved by a GPU: the table is of [" + std::to_string(begin_) + ", " +
                    std::to_string(begin_ + all) +
                    "), a chunk has less than 2^30 bytes, and its address has to be a multiple of "
                    "16");
  }
  RawChunk chunk;
  chunk.wire = wire;
  const uint64_t at = begin - begin_;
  chunk.pieces = device_pieces + at / piece_bytes_ * sizeof(uint64_t);
  chunk.bytes = static_cast<uint32_t>(end - begin);
  chunk.phase = static_cast<uint32_t>(at % piece_bytes_);
  chunk.piece_bytes = piece_bytes_;
  chunk.divider = divider_;
  return chunk;
}

uint32_t raw_groups(uint32_t bytes, uint32_t units) {
  const uint32_t all = (bytes + 63) / 64 * 4;
  return std::max(1u, (all + units - 1) / units);
}

Digest finish_words(const uint64_t* words, uint64_t bytes, uint64_t seed) {
  DigestState state;
  std::copy_n(words, kLanes, state.sum.begin());
  std::copy_n(words + kLanes, kLanes, state.p.begin());
  std::copy_n(words + 2 * kLanes, kLanes, state.q.begin());
  return finish_digest(state, nullptr, 0, bytes, seed);
}

}  // namespace kvxfer::gpu
