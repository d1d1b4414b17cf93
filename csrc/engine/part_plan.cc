// The consumer's side of an agreement: LAYOUT and FETCH ask, ACCEPT answers.

#include <algorithm>
#include <utility>

#include "engine/codec_choice.h"
#include "engine/codecs.h"
#include "engine/core.h"
#include "layout/scale_checks.h"

namespace kvxfer {
namespace {

uint32_t megabytes(double bytes) {
  return static_cast<uint32_t>(std::clamp(bytes / 1e6, 1.0, double{UINT32_MAX}));
}

[[noreturn]] void refuse(const std::string& what) {
  throw Error(StatusCode::kProtocol, "ACCEPT " + what);
}

bool all_equal(const CacheLayout& layout, const Part& part, const PanelFormat& format) {
  const size_t planes = layout.planes.size();
  for (size_t i = 0; i < part.spec.layers.size(); ++i) {
    for (size_t plane = 0; plane < planes; ++plane) {
      const float scale =
          format.producer_scales.empty() ? 1.0f : format.producer_scales[i * planes + plane];
      if (Stored{format.producer_element, scale} != stored(layout, part.spec.layers[i], plane)) {
        return false;
      }
    }
  }
  return true;
}

// What FETCH may be answered with.
bool may_answer(Codec codec, Codec asked) {
  return asked == Codec::kAuto ? codec == Codec::kRaw || codec == kRecommended : codec == asked;
}

// Throws Error(kProtocol) unless a plane is encoded as was asked for: an answer of another scale
// format or group would be another quality.
Encoding checked_encoding(const wire::PlaneEncoding& found, const PlaneSpec& plane, Codec codec,
                          const CodecSpec& asked) {
  const Encoding wanted = encoding_of(codec, plane, asked.group, asked.scale);
  const auto differs = [&](const std::string& what, uint32_t value, uint32_t expected) {
    refuse("names " + what + " " + std::to_string(value) + " for plane '" + plane.name +
           "', where codec " + codec_name(codec) + " as it was asked for has " +
           std::to_string(expected));
  };
  if (found.scheme != static_cast<uint8_t>(wanted.scheme)) {
    differs("scheme", found.scheme, static_cast<uint8_t>(wanted.scheme));
  }
  if (found.scale_format > static_cast<uint8_t>(ScaleFormat::kE8M0)) {
    refuse("names the unknown scale format " + std::to_string(found.scale_format));
  }
  const Encoding named{wanted.scheme, static_cast<ScaleFormat>(found.scale_format), found.group};
  if (wanted.scheme == Scheme::kRaw) return named;  // which has no scales
  if (named.scale != wanted.scale) {
    differs("scale format", found.scale_format, static_cast<uint8_t>(wanted.scale));
  }
  const bool left_to_producer = asked.group == 0 && wanted.scheme != Scheme::kInt8Channel;
  if (!left_to_producer && named.group != wanted.group) {
    differs("group", named.group, wanted.group);
  }
  return named;
}

// Throws Error(kProtocol) unless it is an answer to what was asked.
PanelFormat checked_format(const Part& part, const wire::Accept& accept) {
  const CacheLayout& layout = part.fetch->cache->layout;
  const CodecSpec& asked = part.fetch->spec.codec;
  const auto codec = static_cast<Codec>(accept.codec);
  if (!may_answer(codec, asked.codec)) {
    const bool known = codec_name(codec) != std::string("unknown");
    refuse("names codec " + (known ? codec_name(codec) : "number " + std::to_string(accept.codec)) +
           ", asked for was " + codec_name(asked.codec));
  }
  if (accept.element > static_cast<uint8_t>(ElementType::kFloat8E5M2FNUZ)) {
    refuse("names the unknown element type " + std::to_string(accept.element));
  }
  PanelFormat format;
  format.codec = accept.codec;
  format.panel_tokens = accept.panel_tokens;
  format.producer_element = static_cast<ElementType>(accept.element);
  format.producer_scales = accept.scales;
  check_scales(accept.scales, part.spec.layers.size() * layout.planes.size(),
               format.producer_element);
  if (codec != Codec::kRaw) {
    format.raw_until = asked.raw_until;
    format.raw_from = asked.raw_from;
  }
  if (accept.raw_until != format.raw_until || accept.raw_from != format.raw_from) {
    refuse("leaves other tokens raw than asked for");
  }
  const bool plain = accept.panel_tokens == 0;
  if (plain && (codec != Codec::kRaw || !accept.encodings.empty())) {
    refuse("names a codec for plain memory");
  }
  if (plain) return format;
  if (accept.panel_tokens > asked.panel_tokens || accept.encodings.size() != layout.planes.size()) {
    refuse("names panels of " + std::to_string(accept.panel_tokens) + " tokens and encodings of " +
           std::to_string(accept.encodings.size()) + " planes, where at most " +
           std::to_string(asked.panel_tokens) + " tokens and " +
           std::to_string(layout.planes.size()) + " planes are asked for");
  }
  for (size_t plane = 0; plane < layout.planes.size(); ++plane) {
    format.encodings.push_back(
        checked_encoding(accept.encodings[plane], layout.planes[plane], codec, asked));
    check_encoding(format.encodings.back(), format.producer_element);
  }
  return format;
}

}  // namespace

uint64_t blocks_used(const Part& part) {
  const FetchSpec& spec = part.fetch->spec;
  const uint32_t block_size = part.fetch->cache->layout.block_size;
  return (uint64_t{spec.table.first_slot} + spec.num_tokens + block_size - 1) / block_size;
}

void announce(Peer& peer, const Cache& cache) {
  if (!peer.announced.insert(cache.id).second) return;
  const CacheLayout& layout = cache.layout;
  const auto lowest =
      std::min_element(layout.views.begin(), layout.views.end(),
                       [](const PlaneView& a, const PlaneView& b) { return a.data < b.data; });
  wire::Layout message;
  message.cache_id = cache.id;
  message.model = layout.model;
  message.element = static_cast<uint8_t>(layout.element);
  message.num_blocks = layout.num_blocks;
  message.block_size = layout.block_size;
  message.num_heads = layout.num_heads;
  message.first_head = layout.first_head;
  message.layers = layout.layers;
  for (const PlaneSpec& plane : layout.planes)
    message.planes.push_back({plane.name, plane.content});
  for (const PlaneView& view : layout.views) {
    message.views.push_back({static_cast<uint64_t>(view.data - lowest->data), view.block_stride,
                             view.head_stride, view.token_stride, view.content_stride});
  }
  message.scales = layout.scales;
  peer.link->send(message.encode());
}

void send_fetch(AgentCore& core, Part& part, const std::vector<uint32_t>& slots) {
  announce(*part.peer, *part.fetch->cache);
  const FetchSpec& spec = part.fetch->spec;
  wire::Fetch message;
  message.fetch_id = part.id;
  message.offer_id = spec.offer_id;
  message.generation = spec.generation;
  message.cache_id = part.fetch->cache->id;
  message.layers = part.spec.layers;
  message.head_begin = part.spec.head_begin;
  message.head_end = part.spec.head_end;
  message.token_begin = spec.table.first_token;
  message.token_end = spec.table.first_token + spec.num_tokens;
  message.slot_in_block = spec.table.first_slot;
  const CodecSpec& codec = spec.codec;
  message.codec = static_cast<uint8_t>(codec.codec);
  message.panel_tokens = static_cast<uint16_t>(codec.panel_tokens);
  message.group = static_cast<uint16_t>(codec.group);
  message.scale_format = static_cast<uint8_t>(codec.scale);
  message.raw_until = codec.raw_until;
  message.raw_from = codec.raw_from;
  if (codec.codec == Codec::kAuto && codec_rates_known()) {
    const bool one_sided = part.peer->link->one_sided();
    const uint32_t threads = one_sided ? core.options.threads : core.options.bulk_threads;
    message.unpack_rate = megabytes(codec_rates().unpack * threads);
    message.decode_rate = megabytes(codec_rates().decode * threads);
  }
  message.with_digest = core.options.digest;
  message.chunk_bytes = part.chunk_bytes;
  message.consumers = part.spec.consumers;
  message.slots = slots;
  part.sent = true;
  if (part.asks_gpu) {
    Exposed& exposed = part.peer->exposed.at(part.fetch->cache->gpu.get());
    if (!std::exchange(exposed.told, true)) {
      part.peer->link->expose_gpus();
      part.peer->link->send(exposed.about.encode());
    }
    part.peer->link->send(wire::FetchGpu{std::move(message), exposed.about.arena}.encode());
    return;
  }
  if (!part.asks_direct) {
    part.peer->link->send(message.encode());
    return;
  }
  Registered& target = part.peer->targets.at(message.cache_id);
  if (!std::exchange(target.told, true)) {
    part.peer->link->send(wire::Memory{message.cache_id, target.memory->keys()}.encode());
  }
  wire::FetchDirect direct{std::move(message), wire::FetchDirect::kAuto, spec.table.blocks};
  if (core.options.path == Path::kDirect || spec.gpu_direct_only)
    direct.path = wire::FetchDirect::kDirect;
  direct.blocks.resize(blocks_used(part));
  part.peer->link->send(direct.encode());
}

ChunkPlan plan_part(const Part& part, const wire::Accept& accept) {
  const FetchState& fetch = *part.fetch;
  const CacheLayout& layout = fetch.cache->layout;
  const PanelFormat format = checked_format(part, accept);
  const uint32_t token_begin = fetch.spec.table.first_token,
                 token_end = token_begin + fetch.spec.num_tokens;
  const Slice slice{part.spec.layers, part.spec.head_begin, part.spec.head_end, token_begin,
                    token_end};
  std::vector<uint32_t> planes(layout.planes.size());
  for (uint32_t i = 0; i < planes.size(); ++i) planes[i] = i;
  const auto num_layers = static_cast<uint32_t>(slice.layers.size());
  const bool per_layer = accept.per_layer != 0;
  if (accept.panel_tokens > 0) {
    return ChunkPlan(PanelPlan(layout, fetch.spec.table, slice, planes, format), num_layers,
                     part.chunk_bytes, per_layer);
  }
  if (!all_equal(layout, part, format)) {
    refuse(std::string("announces plain memory of ") + element_name(format.producer_element) +
           " for a cache of " + element_name(layout.element) + " or of other scales");
  }
  WireOrder order;
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<Axis>(accept.order[i]);
  return ChunkPlan(
      CopyPlan(layout, fetch.spec.table, slice,
               tile_ends(token_begin, token_end, accept.producer_block_size, accept.producer_slot,
                         layout.block_size, fetch.spec.table.first_slot),
               order, planes),
      num_layers, part.chunk_bytes, per_layer);
}

}  // namespace kvxfer
