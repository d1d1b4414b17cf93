#include "engine/chunk_plan.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "kvxfer/pack.h"
#include "layout/common_runs.h"

namespace kvxfer {
namespace {

[[noreturn]] void refuse_chunk(uint32_t chunk_bytes, const std::string& what) {
  throw Error(StatusCode::kMismatch, "a chunk of " + std::to_string(chunk_bytes) +
                                         " bytes does not hold " + what +
                                         ": raise chunk_bytes on both sides");
}

// Most panels from `begin` on, but no further than `end`, that fit into a chunk. Consecutive chunks
// hold about as many, so the search begins at `guess`.
uint32_t panels_that_fit(const PanelPlan& plan, uint32_t begin, uint32_t end, uint32_t chunk_bytes,
                         uint32_t guess) {
  const auto fits = [&](uint32_t count) {
    return plan.most_bytes(begin, begin + count) <= chunk_bytes;
  };
  const uint32_t limit = end - begin;
  uint32_t count = std::min(std::max(guess, 1u), limit);
  while (count > 0 && !fits(count)) --count;
  if (count > 0) {
    while (count < limit && fits(count + 1)) ++count;
  }
  return count;
}

}  // namespace

ChunkPlan::ChunkPlan(CopyPlan plan, uint32_t num_layers, uint32_t chunk_bytes, bool per_layer)
    : plan_(std::move(plan)), bounds_{0} {
  const CopyPlan& copy = std::get<CopyPlan>(plan_);
  wire_bytes_ = copy.wire_bytes();
  layer_extent_ = wire_bytes_ / num_layers;
  while (bounds_.back() < wire_bytes_) {
    const uint64_t begin = bounds_.back();
    uint64_t end = begin + chunk_bytes;
    if (per_layer) end = std::min(end, (begin / layer_extent_ + 1) * layer_extent_);
    end = copy.row_floor(std::min(end, wire_bytes_));
    if (end == begin) {
      refuse_chunk(chunk_bytes, "one row of the cache (one token, head and plane)");
    }
    bounds_.push_back(end);
  }
}

ChunkPlan::ChunkPlan(PanelPlan plan, uint32_t num_layers, uint32_t chunk_bytes, bool per_layer)
    : plan_(std::move(plan)), bounds_{0} {
  const PanelPlan& panels = std::get<PanelPlan>(plan_);
  const uint32_t total = panels.num_panels();
  layer_extent_ = total / num_layers;
  uint32_t count = 1;
  for (uint32_t begin = 0; begin < total; begin += count) {
    uint32_t end = total;
    if (per_layer) {
      const auto layer = static_cast<uint32_t>(begin / layer_extent_);
      end = static_cast<uint32_t>((layer + 1) * layer_extent_);
    }
    count = panels_that_fit(panels, begin, end, chunk_bytes, count);
    if (count == 0) refuse_chunk(chunk_bytes, "one panel of the cache");
    bounds_.push_back(begin + count);
    wire_bytes_ += panels.most_bytes(begin, begin + count);
  }
}

uint64_t ChunkPlan::plan_bytes() const {
  const uint64_t rest = std::visit([](const auto& plan) { return plan.plan_bytes(); }, plan_);
  return rest + bounds_.capacity() * sizeof(uint64_t);
}

bool ChunkPlan::can_have(uint32_t chunk, uint64_t bytes) const {
  const uint64_t begin = bounds_[chunk], end = bounds_[chunk + 1];
  if (!coded()) return bytes == end - begin;
  return bytes <= std::get<PanelPlan>(plan_).most_bytes(static_cast<uint32_t>(begin),
                                                        static_cast<uint32_t>(end));
}

uint64_t ChunkPlan::memory_bytes(uint32_t chunk) const {
  const uint64_t begin = bounds_[chunk], end = bounds_[chunk + 1];
  if (!coded()) return end - begin;
  return std::get<PanelPlan>(plan_).memory_bytes(static_cast<uint32_t>(begin),
                                                 static_cast<uint32_t>(end));
}

std::pair<uint32_t, uint32_t> ChunkPlan::chunks_of_layer(uint32_t layer) const {
  const auto index = [&](uint64_t bound) {
    return static_cast<uint32_t>(std::lower_bound(bounds_.begin(), bounds_.end(), bound) -
                                 bounds_.begin());
  };
  return {index(layer * layer_extent_), index((layer + uint64_t{1}) * layer_extent_)};
}

// The same bytes as part of another request, or at another place, must not pass.
uint64_t ChunkPlan::seed(uint32_t chunk, const Generation& generation) const {
  uint64_t half[2];
  std::memcpy(half, generation.data(), sizeof(half));
  return half[0] ^ half[1] ^ (bounds_[chunk] + 1) * 0x9e3779b97f4a7c15u;
}

PackedChunk ChunkPlan::pack(uint32_t chunk, std::byte* wire, const Generation& generation,
                            bool with_digest, bool stream, GpuPacker* gpu, WireIn in) const {
  const uint64_t begin = bounds_[chunk], end = bounds_[chunk + 1];
  const uint64_t place = seed(chunk, generation);
  if (const auto* panels = std::get_if<PanelPlan>(&plan_)) {
    const auto first = static_cast<uint32_t>(begin), last = static_cast<uint32_t>(end);
    const CodedChunk coded =
        gpu != nullptr ? gpu->pack_panels(*panels, first, last, wire, place, in)
                       : pack_panels(*panels, first, last, wire, place, with_digest, stream);
    return {coded.bytes, coded.exceptions, coded.digest};
  }
  const CopyPlan& copy = std::get<CopyPlan>(plan_);
  const Digest digest = gpu != nullptr
                            ? gpu->pack(copy, begin, end, wire, place, with_digest, in)
                            : kvxfer::pack(copy, begin, end, wire, place, with_digest, stream);
  return {static_cast<uint32_t>(end - begin), 0, digest};
}

UnpackedChunk ChunkPlan::unpack(uint32_t chunk, const std::byte* wire, uint32_t bytes,
                                const Generation& generation, bool with_digest, GpuPacker* gpu,
                                WireIn in) const {
  const uint64_t begin = bounds_[chunk], end = bounds_[chunk + 1];
  const uint64_t place = seed(chunk, generation);
  if (const auto* panels = std::get_if<PanelPlan>(&plan_)) {
    const auto first = static_cast<uint32_t>(begin), last = static_cast<uint32_t>(end);
    const DecodedChunk decoded =
        gpu != nullptr ? gpu->unpack_panels(*panels, first, last, wire, bytes, place, in)
                       : unpack_panels(*panels, first, last, wire, bytes, place, with_digest);
    return {decoded.digest, decoded.loss, decoded.exceptions};
  }
  const CopyPlan& copy = std::get<CopyPlan>(plan_);
  const Digest digest = gpu != nullptr ? gpu->unpack(copy, begin, end, wire, place, with_digest, in)
                                       : kvxfer::unpack(copy, begin, end, wire, place, with_digest);
  return {digest, {}, 0};
}

Digest ChunkPlan::digest_of(uint32_t chunk, const std::byte* wire, uint32_t bytes,
                            const Generation& generation) const {
  return digest({wire, bytes}, seed(chunk, generation));
}

Digest ChunkPlan::digest_in_place(uint32_t chunk, const Generation& generation,
                                  GpuPacker* gpu) const {
  const CopyPlan& copy = std::get<CopyPlan>(plan_);
  const uint64_t begin = bounds_[chunk], end = bounds_[chunk + 1];
  const uint64_t place = seed(chunk, generation);
  return gpu != nullptr ? gpu->digest(copy, begin, end, place)
                        : kvxfer::digest_in_place(copy, begin, end, place);
}

std::vector<DirectPiece> ChunkPlan::pieces(uint32_t chunk, const CopyPlan& to) const {
  std::vector<DirectPiece> found;
  CommonRuns runs(std::get<CopyPlan>(plan_), to, bounds_[chunk], bounds_[chunk + 1]);
  for (CommonRuns::Piece piece; runs.next(piece);) {
    found.push_back({piece.from, reinterpret_cast<uint64_t>(piece.to), piece.bytes});
  }
  return found;
}

uint64_t ChunkPlan::count_pieces(const CopyPlan& to, uint64_t enough) const {
  CommonRuns runs(std::get<CopyPlan>(plan_), to, 0, wire_bytes_);
  uint64_t count = 0;
  for (CommonRuns::Piece piece; count < enough && runs.next(piece);) ++count;
  return count;
}

void ChunkPlan::zero_tail(GpuPacker* gpu) const {
  const auto zero = [gpu](const auto& plan) {
    if (gpu == nullptr) return kvxfer::zero_tail(plan);
    std::vector<Run> runs;
    plan.append_tail_runs(runs);
    gpu->zero(runs);
  };
  std::visit(zero, plan_);
}

}  // namespace kvxfer
