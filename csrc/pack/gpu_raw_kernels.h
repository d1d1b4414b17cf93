#ifndef KVXFER_PACK_GPU_RAW_KERNELS_H_
#define KVXFER_PACK_GPU_RAW_KERNELS_H_

// Pack and unpack of raw wire bytes on a GPU: bytes and digest as pack() and unpack() of
// kvxfer/pack.h. One launch moves any number of chunks: group_y() is the chunk, group_x() a range
// of it. On the wire each thread moves 16 bytes, next to its neighbours'; in memory the same bytes
// in accesses of kWidth, which all addresses and sizes are multiples of.

#include "device/kernel/device.h"
#include "pack/gpu_digest.h"
#include "pack/gpu_tables.h"

namespace kvxfer::gpu {

constexpr uint32_t kUnit = 16;  // bytes of the wire that a thread moves at a time

KVXFER_DEVICE char* memory_at(const RawChunk& chunk, uint32_t offset) {
  const uint32_t at = chunk.phase + offset;
  const uint32_t piece = divide(at, chunk.divider);
  const uint64_t base = load<uint64_t>(address_of(chunk.pieces + uint64_t{piece} * 8));
  return address_of(base + (at - piece * chunk.piece_bytes));
}

template <uint32_t kWidth>
struct Access;
template <>
struct Access<1> {
  using Type = uint8_t;
};
template <>
struct Access<4> {
  using Type = uint32_t;
};

// `bytes` <= 16 of the chunk from `offset` on; what is behind them is zero.
template <uint32_t kWidth>
KVXFER_DEVICE Vec16 gather(const RawChunk& chunk, uint32_t offset, uint32_t bytes) {
  if constexpr (kWidth == 16) {
    return load_once<Vec16>(memory_at(chunk, offset));
  } else {
    Vec16 unit = {};
    KVXFER_UNROLL
    for (uint32_t i = 0; i < kUnit; i += kWidth) {
      if (i < bytes) {
        const uint32_t part = load<typename Access<kWidth>::Type>(memory_at(chunk, offset + i));
        unit.word[i / 4] |= part << (i % 4 * 8);
      }
    }
    return unit;
  }
}

template <uint32_t kWidth>
KVXFER_DEVICE void scatter(const RawChunk& chunk, uint32_t offset, uint32_t bytes, Vec16 unit) {
  if constexpr (kWidth == 16) {
    store_once<Vec16>(memory_at(chunk, offset), unit);
  } else {
    KVXFER_UNROLL
    for (uint32_t i = 0; i < kUnit; i += kWidth) {
      if (i < bytes) {
        using Type = typename Access<kWidth>::Type;
        store<Type>(memory_at(chunk, offset + i),
                    static_cast<Type>(unit.word[i / 4] >> (i % 4 * 8)));
      }
    }
  }
}

KVXFER_DEVICE Vec16 wire_part(const char* from, uint32_t bytes) {
  Vec16 unit = {};
  KVXFER_UNROLL
  for (uint32_t i = 0; i < kUnit; ++i) {
    if (i < bytes) unit.word[i / 4] |= uint32_t{load<uint8_t>(from + i)} << (i % 4 * 8);
  }
  return unit;
}

KVXFER_DEVICE void store_wire_part(char* to, uint32_t bytes, const Vec16& unit) {
  KVXFER_UNROLL
  for (uint32_t i = 0; i < kUnit; ++i) {
    if (i < bytes) store<uint8_t>(to + i, static_cast<uint8_t>(unit.word[i / 4] >> (i % 4 * 8)));
  }
}

// Unit `u` of a chunk is half of lanes 2 * (u % 4) and the next. As kThreads is a multiple of 4,
// all units of a thread are of the same lanes.
KVXFER_DEVICE void add_unit(Lane (&lanes)[2], uint32_t u, const Vec16& unit) {
  lanes[0].add(unit.word[0], unit.word[1], u / 4);
  lanes[1].add(unit.word[2], unit.word[3], u / 4);
}

template <uint32_t kWidth, bool kPack, bool kStore>
KVXFER_DEVICE void move_last(const RawChunk& chunk, uint32_t u, Vec16& unit) {
  char* wire = address_of(chunk.wire);
  const uint32_t left = u * kUnit < chunk.bytes ? chunk.bytes - u * kUnit : 0;
  unit = {};
  if (left == 0) return;  // what fills up the last stripe
  if (left >= kUnit) {
    if constexpr (kPack) {
      unit = gather<kWidth>(chunk, u * kUnit, kUnit);
      if constexpr (kStore) store_once<Vec16>(wire + u * kUnit, unit);
    } else {
      unit = load_once<Vec16>(wire + u * kUnit);
      scatter<kWidth>(chunk, u * kUnit, kUnit, unit);
    }
  } else if constexpr (kWidth < kUnit) {
    if constexpr (kPack) {
      unit = gather<kWidth>(chunk, u * kUnit, left);
      if constexpr (kStore) store_wire_part(wire + u * kUnit, left, unit);
    } else {
      unit = wire_part(wire + u * kUnit, left);
      scatter<kWidth>(chunk, u * kUnit, left, unit);
    }
  }
}

// `units` a multiple of 4: what a workgroup moves. `digests` has kDigestWords for each chunk.
// Without kStore nothing is packed, and what would have been is digested where it lies.
template <uint32_t kWidth, bool kPack, bool kDigest, bool kStore = true>
KVXFER_DEVICE void move_raw(const RawChunk* chunks, uint64_t* digests, uint32_t units) {
  constexpr uint32_t kBatch = kWidth == kUnit ? kUnroll : 1;  // narrow ones have loads enough
  const RawChunk chunk = chunks[group_y()];
  const uint32_t whole = chunk.bytes / kUnit;
  const uint32_t all = (chunk.bytes + 63) / 64 * 4;
  const uint32_t begin = group_x() * units;
  if (begin >= all) return;
  const uint32_t end = begin + units < all ? begin + units : all;
  const uint32_t whole_end = end < whole ? end : whole;
  char* wire = address_of(chunk.wire);
  Lane lanes[2];
  if constexpr (kDigest) {
    lanes[0].start(thread_id() % 4 * 2);
    lanes[1].start(thread_id() % 4 * 2 + 1);
  }
  uint32_t first = begin;
  for (; first + kThreads * kBatch <= whole_end; first += kThreads * kBatch) {
    const uint32_t u = first + thread_id();
    Vec16 unit[kBatch];
    KVXFER_UNROLL
    for (uint32_t i = 0; i < kBatch; ++i) {
      const uint32_t offset = (u + i * kThreads) * kUnit;
      unit[i] = kPack ? gather<kWidth>(chunk, offset, kUnit) : load_once<Vec16>(wire + offset);
    }
    KVXFER_UNROLL
    for (uint32_t i = 0; i < kBatch; ++i) {
      const uint32_t offset = (u + i * kThreads) * kUnit;
      if constexpr (kPack) {
        if constexpr (kStore) store_once<Vec16>(wire + offset, unit[i]);
      } else {
        scatter<kWidth>(chunk, offset, kUnit, unit[i]);
      }
      if constexpr (kDigest) add_unit(lanes, u + i * kThreads, unit[i]);
    }
  }
  for (uint32_t u = first + thread_id(); u < end; u += kThreads) {
    Vec16 unit;
    move_last<kWidth, kPack, kStore>(chunk, u, unit);
    if constexpr (kDigest) add_unit(lanes, u, unit);
  }
  if constexpr (kDigest) add_lanes(lanes, digests + group_y() * kDigestWords);
}

}  // namespace kvxfer::gpu

#endif  // KVXFER_PACK_GPU_RAW_KERNELS_H_
