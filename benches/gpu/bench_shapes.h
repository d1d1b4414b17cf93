#ifndef KVXFER_BENCHES_GPU_BENCH_SHAPES_H_
#define KVXFER_BENCHES_GPU_BENCH_SHAPES_H_

#include <string>
#include <vector>

#include "gpu/random_cache.h"

namespace kvxfer::bench {

struct BenchShape {
  std::string name, layout;
  CacheShape cache;
  uint32_t head_end = 1;  // heads [0, head_end) of the cache are fetched
};

// `tokens` of each cache are fetched, all of its blocks in random order.
inline BenchShape make_shape(const std::string& name, uint32_t layers, uint32_t heads,
                             uint32_t head_end, std::vector<uint32_t> contents, uint32_t block_size,
                             bool head_major, uint32_t tokens) {
  BenchShape shape;
  shape.name = name;
  shape.layout = head_major ? "HND" : "NHD";
  shape.cache.layers = layers;
  shape.cache.heads = heads;
  shape.cache.contents = std::move(contents);
  shape.cache.block_size = block_size;
  shape.cache.blocks = tokens / block_size;
  shape.cache.head_major = head_major;
  shape.head_end = head_end;
  return shape;
}

inline std::vector<BenchShape> bench_shapes(bool few) {
  std::vector<BenchShape> shapes;
  for (const uint32_t block : {16u, 64u}) {
    for (const bool head_major : {false, true}) {
      shapes.push_back(make_shape("llama-70b tp8", 80, 1, 1, {128, 128}, block, head_major, 16384));
      if (few) return shapes;
      shapes.push_back(make_shape("1 of 8 heads", 40, 8, 1, {128, 128}, block, head_major, 16384));
      shapes.push_back(make_shape("8 of 8 heads", 40, 8, 8, {128, 128}, block, head_major, 4096));
    }
    shapes.push_back(make_shape("deepseek mla", 61, 1, 1, {576}, block, false, 16384));
  }
  return shapes;
}

inline Request bench_request(const BenchShape& shape) {
  Random random(7);
  Request request;
  request.slice.layers.resize(shape.cache.layers);
  std::iota(request.slice.layers.begin(), request.slice.layers.end(), 0u);
  request.slice.head_end = shape.head_end;
  request.slice.token_end = shape.cache.blocks * shape.cache.block_size;
  request.table.blocks.resize(shape.cache.blocks);
  std::iota(request.table.blocks.begin(), request.table.blocks.end(), 0u);
  std::shuffle(request.table.blocks.begin(), request.table.blocks.end(), random);
  request.plane_of.resize(shape.cache.contents.size());
  std::iota(request.plane_of.begin(), request.plane_of.end(), 0u);
  request.ends =
      tile_ends(0, request.slice.token_end, shape.cache.block_size, 0, shape.cache.block_size, 0);
  return request;
}

}  // namespace kvxfer::bench

#endif  // KVXFER_BENCHES_GPU_BENCH_SHAPES_H_
