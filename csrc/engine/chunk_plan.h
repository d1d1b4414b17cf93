#ifndef KVXFER_ENGINE_CHUNK_PLAN_H_
#define KVXFER_ENGINE_CHUNK_PLAN_H_

#include <cstdint>
#include <utility>
#include <variant>
#include <vector>

#include "kvxfer/agent.h"
#include "kvxfer/copy_plan.h"
#include "kvxfer/panel_plan.h"
#include "pack/gpu_packer.h"

namespace kvxfer {

struct PackedChunk {
  uint32_t bytes = 0;
  uint32_t exceptions = 0;
  Digest digest;
};

struct UnpackedChunk {
  Digest digest;
  Loss loss;
  uint32_t exceptions = 0;
};

// What is sent for one part of a fetch, cut into chunks, mapped to one side's memory: plain memory,
// or panels that are encoded. Both sides compute the same chunks from the same numbers, so a commit
// need only name one. Immutable; safe to use from several threads. `gpu` is null for memory of the
// host, else the packer of the device whose memory it is; only then may `wire` be in a GPU's.
class ChunkPlan {
 public:
  // No chunk is larger than `chunk_bytes`; with `per_layer` none spans two layers. Throws
  // Error(kMismatch) when a chunk can't hold a row, or a panel.
  ChunkPlan(CopyPlan plan, uint32_t num_layers, uint32_t chunk_bytes, bool per_layer);
  ChunkPlan(PanelPlan plan, uint32_t num_layers, uint32_t chunk_bytes, bool per_layer);

  uint64_t plan_bytes() const;  // of the plan itself, in memory

  bool coded() const { return std::holds_alternative<PanelPlan>(plan_); }
  uint32_t num_chunks() const { return static_cast<uint32_t>(bounds_.size() - 1); }
  // Most bytes that all chunks together have on the wire; exact where they are plain memory.
  uint64_t wire_bytes() const { return wire_bytes_; }
  // Whether a chunk can have this size on the wire.
  bool can_have(uint32_t chunk, uint64_t bytes) const;
  // Bytes of the chunk's elements in this side's memory.
  uint64_t memory_bytes(uint32_t chunk) const;
  // Half-open range of the chunks of a wire layer. Only where no chunk spans two.
  std::pair<uint32_t, uint32_t> chunks_of_layer(uint32_t layer) const;

  // `wire` has room for a chunk. `stream`: another core reads what is written there.
  PackedChunk pack(uint32_t chunk, std::byte* wire, const Generation& generation, bool with_digest,
                   bool stream, GpuPacker* gpu, WireIn in = WireIn::kHost) const;
  // Throws Error(kProtocol) for a coded chunk that is not what was agreed on.
  UnpackedChunk unpack(uint32_t chunk, const std::byte* wire, uint32_t bytes,
                       const Generation& generation, bool with_digest, GpuPacker* gpu,
                       WireIn in = WireIn::kHost) const;
  // Of the bytes that pack() would leave for this chunk.
  Digest digest_of(uint32_t chunk, const std::byte* wire, uint32_t bytes,
                   const Generation& generation) const;

  // What pack() would digest, where it lies in this side's memory. Of plain memory only.
  Digest digest_in_place(uint32_t chunk, const Generation& generation, GpuPacker* gpu) const;
  // The same in pieces that lie in one place in this side's memory and in that of `to`, which has
  // the same wire and begins at address 0.
  std::vector<DirectPiece> pieces(uint32_t chunk, const CopyPlan& to) const;
  // How many pieces all chunks have, counted no further than `enough`. What a chunk's end cuts is
  // one of them.
  uint64_t count_pieces(const CopyPlan& to, uint64_t enough) const;

  // Zeroes the slots behind the last token in its block.
  void zero_tail(GpuPacker* gpu) const;

 private:
  uint64_t seed(uint32_t chunk, const Generation& generation) const;

  std::variant<CopyPlan, PanelPlan> plan_;
  uint64_t layer_extent_ = 0;     // of a layer, in the unit of bounds_
  std::vector<uint64_t> bounds_;  // of the chunks, in wire bytes or panels
  uint64_t wire_bytes_ = 0;
};

}  // namespace kvxfer

#endif  // KVXFER_ENGINE_CHUNK_PLAN_H_
