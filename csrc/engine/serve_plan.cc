// What a FETCH asks for, compared with what is on offer: the producer's decision how it is sent.

#include <algorithm>
#include <utility>

#include "engine/codec_choice.h"
#include "engine/codecs.h"
#include "engine/core.h"

namespace kvxfer {
namespace {

std::string range(uint32_t begin, uint32_t end) {
  return "[" + std::to_string(begin) + ", " + std::to_string(end) + ")";
}

// Everything about the two caches and the slice that must agree. Throws Error(kMismatch).
void check_fit(const AgentCore& core, const wire::Fetch& request, const OfferState& offer,
               const CacheLayout& theirs) {
  const CacheLayout& ours = offer.cache->layout;
  const auto mismatch = [&](const std::string& what, const std::string& held,
                            const std::string& wanted) {
    throw Error(StatusCode::kMismatch, "offer '" + offer.id + "': " + what + ": producer '" +
                                           core.options.name + "' has " + held +
                                           ", the consumer's cache has " + wanted);
  };
  if (!ours.model.empty() && !theirs.model.empty() && ours.model != theirs.model) {
    mismatch("different models", "'" + ours.model + "'", "'" + theirs.model + "'");
  }
  const auto plane_list = [](const CacheLayout& layout) {
    std::string text;
    for (const PlaneSpec& plane : layout.planes) {
      text += (text.empty() ? "" : ", ") + plane.name + " of " + std::to_string(plane.content);
    }
    return text + " elements a token and head";
  };
  bool same_planes = ours.planes.size() == theirs.planes.size();
  for (const PlaneSpec& plane : theirs.planes) {
    same_planes &= std::any_of(ours.planes.begin(), ours.planes.end(), [&](const PlaneSpec& mine) {
      return mine.name == plane.name && mine.content == plane.content;
    });
  }
  if (!same_planes)
    mismatch("different planes or head sizes", plane_list(ours), plane_list(theirs));
  for (uint32_t layer : request.layers) {
    if (layer >= theirs.layers.size())
      throw Error(StatusCode::kProtocol, "FETCH names a layer that LAYOUT has not");
    if (!offer.cache->layer_index.contains(theirs.layers[layer])) {
      throw Error(StatusCode::kMismatch, "offer '" + offer.id + "': producer '" +
                                             core.options.name + "' holds no layer '" +
                                             theirs.layers[layer] + "'; it holds " +
                                             std::to_string(ours.layers.size()) +
                                             " layers, the first is '" + ours.layers.front() + "'");
    }
  }
  const uint32_t head_end = ours.first_head + ours.num_heads;
  if (request.head_begin < ours.first_head || request.head_end > head_end ||
      request.head_begin >= request.head_end) {
    mismatch("kv heads", range(ours.first_head, head_end),
             "asked for " + range(request.head_begin, request.head_end));
  }
  if (request.token_begin < offer.table.first_token || request.token_end > offer.token_end ||
      request.token_begin >= request.token_end) {
    mismatch("tokens", range(offer.table.first_token, offer.token_end),
             "asked for " + range(request.token_begin, request.token_end));
  }
  if (request.layers.empty() || request.chunk_bytes == 0 ||
      request.chunk_bytes > core.options.slot_bytes || request.slot_in_block >= theirs.block_size) {
    throw Error(StatusCode::kProtocol,
                "FETCH is out of bounds: no layers, or chunk or slot too large");
  }
}

// The slice in terms of this side's cache.
struct Wanted {
  Slice slice;
  std::vector<uint32_t> plane_of;  // wire plane -> plane
  uint32_t slot = 0;               // of the first token in its block
};

Wanted locate(Serve& serve, const OfferState& offer, const CacheLayout& theirs) {
  const wire::Fetch& request = serve.request;
  const CacheLayout& ours = offer.cache->layout;
  Wanted wanted{
      {{}, request.head_begin, request.head_end, request.token_begin, request.token_end}, {}, 0};
  serve.wire_layer.assign(ours.layers.size(), -1);
  for (size_t i = 0; i < request.layers.size(); ++i) {
    const uint32_t layer = offer.cache->layer_index.at(theirs.layers[request.layers[i]]);
    if (serve.wire_layer[layer] >= 0)
      throw Error(StatusCode::kProtocol, "FETCH names a layer twice");
    serve.wire_layer[layer] = static_cast<int32_t>(i);
    wanted.slice.layers.push_back(layer);
  }
  for (const PlaneSpec& plane : theirs.planes) {
    const auto mine =
        std::find_if(ours.planes.begin(), ours.planes.end(),
                     [&](const PlaneSpec& candidate) { return candidate.name == plane.name; });
    wanted.plane_of.push_back(static_cast<uint32_t>(mine - ours.planes.begin()));
  }
  wanted.slot =
      (offer.table.first_slot + request.token_begin - offer.table.first_token) % ours.block_size;
  return wanted;
}

// Whether the consumer's cache holds the same bits for the same values; throws Error(kMismatch)
// where what is held here can't become what it holds.
bool same_elements(const AgentCore& core, const Serve& serve, const OfferState& offer,
                   const CacheLayout& theirs, const Wanted& wanted) {
  const CacheLayout& ours = offer.cache->layout;
  bool same = true;
  for (size_t layer = 0; layer < wanted.slice.layers.size(); ++layer) {
    for (size_t plane = 0; plane < wanted.plane_of.size(); ++plane) {
      const Stored from = stored(ours, wanted.slice.layers[layer], wanted.plane_of[plane]);
      const Stored to = stored(theirs, serve.request.layers[layer], plane);
      same &= from == to;
      if (can_convert(from, to)) continue;
      throw Error(StatusCode::kMismatch,
                  "offer '" + offer.id + "': different element types: producer '" +
                      core.options.name + "' has " + element_name(ours.element) +
                      ", which cannot become the " + element_name(theirs.element) +
                      " of the cache of '" + serve.peer->name + "'");
    }
  }
  return same;
}

void check_request(const wire::Fetch& request) {
  const auto codec = static_cast<Codec>(request.codec);
  if (codec_name(codec) == std::string("unknown")) {
    throw Error(StatusCode::kMismatch, "codec " + std::to_string(request.codec) +
                                           " is not known here: install the same kvxfer release on "
                                           "both sides");
  }
  if (request.panel_tokens < 1 || request.panel_tokens > kMaxPanelRows ||
      request.scale_format > static_cast<uint8_t>(ScaleFormat::kE8M0) ||
      request.raw_until > request.raw_from) {
    throw Error(StatusCode::kProtocol, "FETCH asks for a codec with senseless parameters");
  }
}

// How many of the tokens are not left as they are.
uint32_t coded_tokens(const wire::Fetch& request) {
  const uint32_t begin = std::max(request.token_begin, request.raw_until);
  const uint32_t end = std::min(request.token_end, request.raw_from);
  return end > begin ? end - begin : 0;
}

CodecChoice choose_for(const AgentCore& core, const Serve& serve, const CacheLayout& ours,
                       const CacheLayout& theirs) {
  const wire::Fetch& request = serve.request;
  const Peer& peer = *serve.peer;
  const auto raw = [](const std::string& why) -> CodecChoice {
    return {Codec::kRaw, "auto: " + why};
  };
  if (!peer.link->mapped_arena().empty()) {
    return raw("memory is shared, so nothing crosses a link");
  }
  if (is_float8(ours.element) || ours.element == ElementType::kUInt8) {
    return raw(std::string("the cache holds ") + element_name(ours.element) +
               ", which is 8 bit as it is");
  }
  if (schemes_of(kRecommended) & ~peer.schemes) {
    return raw(std::string("the consumer does not have ") + codec_name(kRecommended));
  }
  const auto encodings = encodings_of(kRecommended, theirs.planes, request.group,
                                      static_cast<ScaleFormat>(request.scale_format));
  double row = 0, coded_row = 0;
  for (size_t plane = 0; plane < encodings.size(); ++plane) {
    const uint32_t content = theirs.planes[plane].content;
    row += static_cast<double>(content * element_bytes(ours.element));
    coded_row += static_cast<double>(
                     panel_bytes(encodings[plane], ours.element, request.panel_tokens, content)) /
                 request.panel_tokens;
  }
  const double rows =
      static_cast<double>(request.layers.size()) * (request.head_end - request.head_begin);
  const double tokens = request.token_end - request.token_begin;
  const double coded = coded_tokens(request);
  const auto link = peer.link->rate();
  if (!link) return choose_codec({});
  const CodecRates& rates = codec_rates();
  const double threads = core.options.threads;
  return choose_codec({link,
                       {rates.pack * threads, request.unpack_rate * 1e6, rates.encode * threads,
                        request.decode_rate * 1e6},
                       rows * tokens * row,
                       rows * (coded * coded_row + (tokens - coded) * row)});
}

// Fewer tokens than asked for, where a chunk does not hold a panel of so many.
uint32_t fit_panels(const wire::Fetch& request, const std::vector<Encoding>& encodings,
                    const std::vector<PlaneSpec>& planes, ElementType element) {
  const uint32_t all = request.token_end - request.token_begin;
  const auto fits = [&](uint32_t tokens) {
    return most_panel_chunk(encodings, planes, element, std::min(tokens, all)) <=
           request.chunk_bytes;
  };
  uint32_t tokens = request.panel_tokens;
  while (tokens > 1 && !fits(tokens)) tokens /= 2;
  return tokens;
}

// What goes into ACCEPT about the codec, decided but for how the two caches lie.
void decide_codec(const AgentCore& core, const Serve& serve, const OfferState& offer,
                  const CacheLayout& theirs, wire::Accept& accept) {
  const wire::Fetch& request = serve.request;
  const CacheLayout& ours = offer.cache->layout;
  CodecChoice choice{static_cast<Codec>(request.codec), "as asked"};
  if (choice.codec == Codec::kAuto) choice = choose_for(core, serve, ours, theirs);
  const auto encodings = encodings_of(choice.codec, theirs.planes, request.group,
                                      static_cast<ScaleFormat>(request.scale_format));
  for (const Encoding& encoding : encodings) {
    try {
      check_encoding(encoding, ours.element);
    } catch (const Error& error) {
      throw Error(StatusCode::kMismatch,
                  "offer '" + offer.id + "': codec " + codec_name(choice.codec) + ", which '" +
                      serve.peer->name + "' asks for, does not go with the " +
                      element_name(ours.element) + " of producer '" + core.options.name +
                      "' (the consumer's cache holds " + element_name(theirs.element) +
                      "): " + error.what() + "; fetch with codec raw");
    }
    accept.encodings.push_back({static_cast<uint8_t>(encoding.scheme),
                                static_cast<uint8_t>(encoding.scale), encoding.group});
  }
  if (choice.codec != Codec::kRaw) {
    accept.raw_until = request.raw_until;
    accept.raw_from = request.raw_from;
    if (coded_tokens(request) < request.token_end - request.token_begin) {
      choice.why +=
          "; tokens outside " + range(request.raw_until, request.raw_from) + " travel as they are";
    }
  }
  accept.codec = static_cast<uint8_t>(choice.codec);
  accept.panel_tokens =
      static_cast<uint16_t>(fit_panels(request, encodings, theirs.planes, ours.element));
  accept.why = choice.why;
}

PanelFormat format_of(const wire::Accept& accept, ElementType element) {
  PanelFormat format;
  format.codec = accept.codec;
  format.panel_tokens = accept.panel_tokens;
  for (const wire::PlaneEncoding& plane : accept.encodings) {
    format.encodings.push_back({static_cast<Scheme>(plane.scheme),
                                static_cast<ScaleFormat>(plane.scale_format), plane.group});
  }
  format.raw_until = accept.raw_until;
  format.raw_from = accept.raw_from;
  format.producer_element = element;
  format.producer_scales = accept.scales;
  return format;
}

// The order in which both sides together have the fewest runs of memory.
WireOrder order_for(Serve& serve, const OfferState& offer, const CacheLayout& theirs) {
  auto& orders = serve.peer->orders;
  const OrderKey key{serve.request.cache_id, offer.cache->id, serve.per_layer};
  auto known = orders.find(key);
  if (known == orders.end()) {
    const WireOrder order = choose_wire_order(offer.cache->layout, theirs, serve.per_layer);
    known = orders.emplace(key, order).first;
  }
  return known->second;
}

// The same bytes in the consumer's blocks, counted from the lowest address of its cache.
CopyPlan consumers_plan(const Serve& serve, const CacheLayout& theirs,
                        const std::vector<uint32_t>& tiles, const WireOrder& order) {
  const wire::Fetch& request = serve.request;
  std::vector<uint32_t> planes(theirs.planes.size());
  for (uint32_t i = 0; i < planes.size(); ++i) planes[i] = i;
  const BlockTable table{serve.blocks, request.token_begin, request.slot_in_block};
  const Slice slice{request.layers, request.head_begin, request.head_end, request.token_begin,
                    request.token_end};
  try {
    return CopyPlan(theirs, table, slice, tiles, order, planes);
  } catch (const Error& error) {
    throw Error(StatusCode::kProtocol, std::string("FETCH_DIRECT: ") + error.what());
  }
}

}  // namespace

std::optional<wire::Bytes> accept_fetch(AgentCore& core, Serve& serve, const OfferState& offer,
                                        const CacheLayout& theirs) {
  check_fit(core, serve.request, offer, theirs);
  check_request(serve.request);
  const wire::Fetch& request = serve.request;
  const CacheLayout& ours = offer.cache->layout;
  const Wanted wanted = locate(serve, offer, theirs);
  const bool same = same_elements(core, serve, offer, theirs, wanted);
  serve.per_layer = offer.ready_left > 0;

  wire::Accept accept;
  accept.fetch_id = request.fetch_id;
  accept.per_layer = serve.per_layer;
  accept.producer_block_size = ours.block_size;
  accept.producer_slot = wanted.slot;
  accept.element = static_cast<uint8_t>(ours.element);
  if (!ours.scales.empty()) {
    for (const uint32_t layer : wanted.slice.layers) {
      for (const uint32_t plane : wanted.plane_of)
        accept.scales.push_back(ours.scale(layer, plane));
    }
  }
  decide_codec(core, serve, offer, theirs, accept);
  const auto num_layers = static_cast<uint32_t>(wanted.slice.layers.size());
  wire::AcceptDirect answer;
  answer.path_why = "chunks are coded";
  WireOrder order{Axis::kLayer, Axis::kPlane, Axis::kTile, Axis::kHead, Axis::kToken};
  if (same && accept.codec == static_cast<uint8_t>(Codec::kRaw)) {
    accept.panel_tokens = 0;
    accept.encodings.clear();
    order = order_for(serve, offer, theirs);
    const auto tiles = tile_ends(request.token_begin, request.token_end, ours.block_size,
                                 wanted.slot, theirs.block_size, request.slot_in_block);
    serve.plan.emplace(CopyPlan(ours, offer.table, wanted.slice, tiles, order, wanted.plane_of),
                       num_layers, request.chunk_bytes, serve.per_layer);
    if (serve.path != 0) {
      const auto why = choose_path(core, serve, offer, consumers_plan(serve, theirs, tiles, order));
      if (!why) return std::nullopt;
      answer.path_why = *why;
    }
  } else {
    serve.plan.emplace(PanelPlan(ours, offer.table, wanted.slice, wanted.plane_of,
                                 format_of(accept, ours.element)),
                       num_layers, request.chunk_bytes, serve.per_layer);
  }
  if (core.options.gpu_direct_only && offer.cache->gpu && !serve.direct) {
    throw Error(
        StatusCode::kNoResources,
        "offer '" + offer.id + "': producer '" + core.options.name +
            "' requires gpudirect-rdma, and this would be staged in its host's memory: " +
            (serve.path == 0 ? "the consumer does not ask for the direct path" : answer.path_why));
  }
  for (size_t i = 0; i < order.size(); ++i) accept.order[i] = static_cast<uint8_t>(order[i]);
  accept.num_chunks = serve.plan->num_chunks();
  accept.wire_bytes = serve.plan->wire_bytes();
  if (serve.arena != 0) {
    const auto why = choose_gpu_slots(serve, offer);
    if (!why) return std::nullopt;
    return wire::AcceptGpu{std::move(accept), serve.gpu_slots != nullptr, *why}.encode();
  }
  if (serve.path == 0) return accept.encode();
  answer.accept = std::move(accept);
  answer.direct = serve.direct.has_value();
  return answer.encode();
}

}  // namespace kvxfer
