#ifndef KVXFER_LAYOUT_H_
#define KVXFER_LAYOUT_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kvxfer/element.h"

namespace kvxfer {

// One plane of one layer: a strided [block, kv head, token, content] view. Strides are in bytes.
struct PlaneView {
  std::byte* data = nullptr;  // element [0, 0, 0, 0]
  int64_t block_stride = 0;
  int64_t head_stride = 0;
  int64_t token_stride = 0;
  int64_t content_stride = 0;
};

// What a plane holds, the same in every layer of a cache.
struct PlaneSpec {
  std::string name;      // "k", "v", "latent", ...: planes of two caches are matched by name
  uint32_t content = 0;  // elements per (token, kv head); head size for k and v
};

// An engine's paged KV cache. Layers of different geometry belong in caches of their own.
// K and V packed in one content axis are two planes whose views differ in `data` only.
struct CacheLayout {
  std::string model;  // both sides must agree when both name one; empty is "not said"
  ElementType element = ElementType::kBFloat16;
  uint32_t num_blocks = 0;
  uint32_t block_size = 0;  // tokens per block
  uint32_t num_heads = 0;   // kv heads held here
  uint32_t first_head = 0;  // global index of the first of them: TP rank r of n holds r*h/n ...
  std::vector<std::string> layers;  // names, unique, in model order
  std::vector<PlaneSpec> planes;
  std::vector<PlaneView> views;  // [layers.size()][planes.size()], layer-major
  // What a stored number is multiplied by to get the value, [layers.size()][planes.size()]; empty
  // for 1 everywhere. Only caches of 8-bit floats have others; the least is 2^-126.
  std::vector<float> scales;

  const PlaneView& view(size_t layer, size_t plane) const {
    return views[layer * planes.size() + plane];
  }
  float scale(size_t layer, size_t plane) const {
    return scales.empty() ? 1.0f : scales[layer * planes.size() + plane];
  }
  uint64_t token_bytes() const;  // of one token over all layers, planes and heads

  // Throws Error(kInvalid) naming the layer, plane and axis when anything is empty, a stride is
  // negative or makes two elements share memory, names repeat, two views are the same memory, or a
  // scale is not as above.
  void validate() const;
};

// Half-open ranges of what a fetch asks for. Heads are global indices. Layers index `layers`.
struct Slice {
  std::vector<uint32_t> layers;
  uint32_t head_begin = 0, head_end = 0;
  uint32_t token_begin = 0, token_end = 0;  // positions in the request
};

}  // namespace kvxfer

#endif  // KVXFER_LAYOUT_H_
