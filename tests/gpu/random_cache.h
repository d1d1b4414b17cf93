#ifndef KVXFER_TESTS_GPU_RANDOM_CACHE_H_
#define KVXFER_TESTS_GPU_RANDOM_CACHE_H_

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kvxfer/copy_plan.h"
#include "kvxfer/layout.h"

namespace kvxfer {

using Random = std::mt19937;

inline uint32_t between(Random& random, uint32_t least, uint32_t most) {
  return std::uniform_int_distribution<uint32_t>(least, most)(random);
}

template <class T>
T one_of(Random& random, std::initializer_list<T> choices) {
  return choices.begin()[between(random, 0, static_cast<uint32_t>(choices.size()) - 1)];
}

// What there is to say about a cache before one knows where it lies.
struct CacheShape {
  ElementType element = ElementType::kBFloat16;
  uint32_t layers = 1, heads = 1, block_size = 16, blocks = 8;
  std::vector<uint32_t> contents;  // of the planes
  bool head_major = false;         // HND, else NHD
  uint32_t gap = 0;                // bytes between blocks

  uint64_t row_bytes(size_t plane) const { return contents[plane] * element_bytes(element); }
  uint64_t block_stride(size_t plane) const { return row_bytes(plane) * heads * block_size + gap; }
  uint64_t bytes() const {
    uint64_t total = 0;
    for (size_t i = 0; i < contents.size(); ++i) total += block_stride(i) * blocks;
    return total * layers;
  }

  // The cache at `base`, which is not looked at.
  CacheLayout layout(std::byte* base) const {
    CacheLayout layout;
    layout.element = element;
    layout.num_blocks = blocks;
    layout.block_size = block_size;
    layout.num_heads = heads;
    for (size_t i = 0; i < contents.size(); ++i) {
      layout.planes.push_back({"p" + std::to_string(i), contents[i]});
    }
    for (uint32_t layer = 0; layer < layers; ++layer) {
      layout.layers.push_back("l" + std::to_string(layer));
      for (size_t i = 0; i < contents.size(); ++i) {
        const auto row = static_cast<int64_t>(row_bytes(i));
        const int64_t head = head_major ? row * block_size : row;
        const int64_t token = head_major ? row : row * heads;
        layout.views.push_back({base, static_cast<int64_t>(block_stride(i)), head, token,
                                static_cast<int64_t>(element_bytes(element))});
        base += block_stride(i) * blocks;
      }
    }
    return layout;
  }
};

// Some tokens of some heads and all layers of a cache, in blocks in any order.
struct Request {
  Slice slice;
  BlockTable table;
  std::vector<uint32_t> plane_of;
  std::vector<uint32_t> ends;
  WireOrder order = {Axis::kLayer, Axis::kPlane, Axis::kTile, Axis::kHead, Axis::kToken};

  CopyPlan plan(const CacheLayout& layout) const {
    return CopyPlan(layout, table, slice, ends, order, plane_of);
  }
};

inline CacheShape random_shape(Random& random) {
  CacheShape shape;
  shape.element = one_of(random, {ElementType::kBFloat16, ElementType::kFloat32,
                                  ElementType::kFloat16, ElementType::kUInt8});
  shape.layers = between(random, 1, 3);
  shape.heads = between(random, 1, 4);
  shape.block_size = one_of(random, {1u, 3u, 8u, 16u});
  shape.blocks = between(random, 2, 12);
  for (uint32_t planes = between(random, 1, 2); planes > 0; --planes) {
    shape.contents.push_back(one_of(random, {1u, 5u, 8u, 12u, 64u, 80u, 128u, 576u}));
  }
  shape.head_major = between(random, 0, 1) == 1;
  shape.gap =
      one_of(random, {0u, 0u, 4u, 64u}) * static_cast<uint32_t>(element_bytes(shape.element));
  return shape;
}

inline Request random_request(Random& random, const CacheShape& shape) {
  Request request;
  request.slice.layers.resize(shape.layers);
  std::iota(request.slice.layers.begin(), request.slice.layers.end(), 0u);
  request.slice.head_begin = between(random, 0, shape.heads - 1);
  request.slice.head_end = between(random, request.slice.head_begin + 1, shape.heads);
  const uint32_t slots = shape.blocks * shape.block_size;
  request.table.first_slot = between(random, 0, shape.block_size - 1);
  request.table.first_token = between(random, 0, 5);
  const uint32_t most = slots - request.table.first_slot;
  request.slice.token_begin = request.table.first_token + between(random, 0, most - 1);
  request.slice.token_end =
      request.slice.token_begin +
      between(random, 1, most - (request.slice.token_begin - request.table.first_token));
  request.table.blocks.resize(shape.blocks);
  std::iota(request.table.blocks.begin(), request.table.blocks.end(), 0u);
  std::shuffle(request.table.blocks.begin(), request.table.blocks.end(), random);
  request.plane_of.resize(shape.contents.size());
  std::iota(request.plane_of.begin(), request.plane_of.end(), 0u);
  const uint32_t slot =
      (request.table.first_slot + request.slice.token_begin - request.table.first_token) %
      shape.block_size;
  request.ends = tile_ends(request.slice.token_begin, request.slice.token_end, shape.block_size,
                           slot, shape.block_size, slot);
  if (between(random, 0, 1) == 1) {
    request.order = {Axis::kTile, Axis::kLayer, Axis::kPlane, Axis::kToken, Axis::kHead};
  }
  return request;
}

// Cuts wire bytes [0, wire_bytes()) at rows, into chunks of about `bytes`.
inline std::vector<uint64_t> cut_chunks(const CopyPlan& plan, uint64_t bytes) {
  std::vector<uint64_t> cuts = {0};
  while (cuts.back() < plan.wire_bytes()) {
    uint64_t next = plan.row_floor(std::min(cuts.back() + bytes, plan.wire_bytes()));
    if (next <= cuts.back()) next = plan.wire_bytes();
    cuts.push_back(next);
  }
  return cuts;
}

inline void fill_random(Random& random, std::byte* to, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) to[i] = static_cast<std::byte>(random() >> 11);
}

}  // namespace kvxfer

#endif  // KVXFER_TESTS_GPU_RANDOM_CACHE_H_
