#include <algorithm>
#include <string>
#include <utility>

#include "kvxfer/copy_plan.h"
#include "kvxfer/status.h"
#include "layout/address.h"

namespace kvxfer {
namespace {

// Runs of more layers than these are more of the same.
constexpr size_t kSampleLayers = 4;

bool valid(const WireOrder& order, bool layer_first) {
  if (layer_first && order[0] != Axis::kLayer) return false;
  return std::find(order.begin(), order.end(), Axis::kTile) <
         std::find(order.begin(), order.end(), Axis::kToken);
}

// The part of both caches that orders are judged on: one whole block of what they have in common.
struct Sample {
  std::vector<uint32_t> producer_layers, consumer_layers;
  std::vector<uint32_t> producer_planes, consumer_planes;
  uint32_t head_begin = 0, head_end = 0;
  uint32_t tokens = 0;
};

template <class Names>
void match(const Names& ours, const Names& theirs, size_t limit, std::vector<uint32_t>& our_indices,
           std::vector<uint32_t>& their_indices) {
  for (uint32_t i = 0; i < ours.size() && our_indices.size() < limit; ++i) {
    const auto found = std::find(theirs.begin(), theirs.end(), ours[i]);
    if (found == theirs.end()) continue;
    our_indices.push_back(i);
    their_indices.push_back(static_cast<uint32_t>(found - theirs.begin()));
  }
}

std::vector<std::string> plane_names(const CacheLayout& layout) {
  std::vector<std::string> names;
  for (const PlaneSpec& plane : layout.planes) names.push_back(plane.name);
  return names;
}

Sample common_sample(const CacheLayout& producer, const CacheLayout& consumer) {
  Sample sample;
  match(producer.layers, consumer.layers, kSampleLayers, sample.producer_layers,
        sample.consumer_layers);
  match(plane_names(producer), plane_names(consumer), producer.planes.size(),
        sample.producer_planes, sample.consumer_planes);
  sample.head_begin = std::max(producer.first_head, consumer.first_head);
  sample.head_end =
      std::min(producer.first_head + producer.num_heads, consumer.first_head + consumer.num_heads);
  sample.tokens = std::min(producer.block_size, consumer.block_size);
  const bool disjoint = sample.producer_layers.empty() || sample.producer_planes.empty() ||
                        sample.head_begin >= sample.head_end;
  if (disjoint || sample.tokens == 0) {
    throw Error(StatusCode::kMismatch, std::string("the two caches have no ") +
                                           (sample.producer_layers.empty()   ? "layer"
                                            : sample.producer_planes.empty() ? "plane"
                                                                             : "kv head") +
                                           " in common, so there is nothing to transfer");
  }
  return sample;
}

// The order in which the cache's memory is laid out. Layers and planes that are allocations of
// their own count as outermost.
WireOrder natural_order(const CacheLayout& layout, const std::vector<uint32_t>& layers,
                        const std::vector<uint32_t>& planes) {
  constexpr int64_t kApart = INT64_MAX - 1;
  const PlaneView& first = layout.view(layers[0], planes[0]);
  const int64_t whole = first.block_stride * layout.num_blocks;
  const auto distance = [&](const PlaneView& other, int64_t if_apart) {
    const int64_t bytes = std::abs(address_difference(other.data, first.data));
    return bytes >= whole ? if_apart : bytes;
  };
  const int64_t layer =
      layers.size() > 1 ? distance(layout.view(layers[1], planes[0]), kApart + 1) : kApart + 1;
  const int64_t plane =
      planes.size() > 1 ? distance(layout.view(layers[0], planes[1]), kApart) : kApart;
  std::array<std::pair<int64_t, Axis>, 5> axes = {{
      {layer, Axis::kLayer},
      {plane, Axis::kPlane},
      {std::max(first.block_stride, first.token_stride), Axis::kTile},
      {layout.num_heads > 1 ? first.head_stride : first.block_stride, Axis::kHead},
      {first.token_stride, Axis::kToken},
  }};
  std::stable_sort(axes.begin(), axes.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  WireOrder order;
  std::transform(axes.begin(), axes.end(), order.begin(), [](const auto& a) { return a.second; });
  return order;
}

WireOrder move_layer_first(WireOrder order) {
  const auto layer = std::find(order.begin(), order.end(), Axis::kLayer);
  std::rotate(order.begin(), layer, layer + 1);
  return order;
}

}  // namespace

// Counts the pieces that the sample is in on one side.
class OrderJudge {
 public:
  OrderJudge(const CacheLayout& layout, const Sample& sample, const std::vector<uint32_t>& layers,
             const std::vector<uint32_t>& planes, const WireOrder& natural)
      : plan_(layout, BlockTable{{0}, 0, 0},
              Slice{layers, sample.head_begin, sample.head_end, 0, sample.tokens}, {sample.tokens},
              natural, planes),
        tokens_(sample.tokens) {}

  uint64_t pieces(const WireOrder& order) {
    plan_.set_order(order);
    plan_.find_contiguity();
    return plan_.count_pieces(0, 0, 0, tokens_);
  }

 private:
  CopyPlan plan_;
  const uint32_t tokens_;
};

WireOrder choose_wire_order(const CacheLayout& producer, const CacheLayout& consumer,
                            bool layer_first) {
  const Sample sample = common_sample(producer, consumer);
  WireOrder ours = natural_order(producer, sample.producer_layers, sample.producer_planes);
  WireOrder theirs = natural_order(consumer, sample.consumer_layers, sample.consumer_planes);
  if (layer_first) {
    ours = move_layer_first(ours);
    theirs = move_layer_first(theirs);
  }
  OrderJudge at_producer(producer, sample, sample.producer_layers, sample.producer_planes, ours);
  OrderJudge at_consumer(consumer, sample, sample.consumer_layers, sample.consumer_planes, theirs);

  WireOrder best = theirs;
  const uint64_t least = at_consumer.pieces(theirs);
  uint64_t fewest = at_producer.pieces(theirs) + least;
  // No order is better for a side than its own.
  const uint64_t bound = at_producer.pieces(ours) + least;
  if (fewest == bound) return best;
  const auto consider = [&](const WireOrder& order) {
    uint64_t pieces = at_producer.pieces(order);
    if (pieces >= fewest) return;
    pieces += at_consumer.pieces(order);
    if (pieces >= fewest) return;
    fewest = pieces;
    best = order;
  };
  consider(ours);
  WireOrder order = {Axis::kLayer, Axis::kPlane, Axis::kTile, Axis::kHead, Axis::kToken};
  do {
    if (valid(order, layer_first)) consider(order);
  } while (fewest > bound && std::next_permutation(order.begin(), order.end()));
  return best;
}

}  // namespace kvxfer
