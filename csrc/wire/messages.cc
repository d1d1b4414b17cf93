#include "wire/messages.h"

#include <bit>

#include "base/byte_io.h"

namespace kvxfer::wire {
namespace {

ByteWriter begin(MessageType type) {
  ByteWriter out;
  out.put(static_cast<uint8_t>(type));
  return out;
}

StatusCode checked_code(uint8_t code) {
  if (code == 0 || code > static_cast<uint8_t>(kLastStatus)) {
    throw Error(StatusCode::kProtocol,
                "REFUSED carries the unknown status " + std::to_string(code));
  }
  return static_cast<StatusCode>(code);
}

void put_floats(ByteWriter& out, const std::vector<float>& values) {
  out.put(static_cast<uint32_t>(values.size()));
  for (float value : values) out.put(std::bit_cast<uint32_t>(value));
}

std::vector<float> get_floats(ByteReader& in) {
  std::vector<float> values;
  for (uint32_t bits : in.get_list(kMaxScales)) values.push_back(std::bit_cast<float>(bits));
  return values;
}

}  // namespace

MessageType type_of(std::span<const std::byte> message) {
  if (message.empty()) throw Error(StatusCode::kProtocol, "empty message");
  const auto type = static_cast<uint8_t>(message[0]);
  if (type < static_cast<uint8_t>(MessageType::kHello) ||
      type > static_cast<uint8_t>(kLastMessage)) {
    throw Error(StatusCode::kProtocol, "unknown message type " + std::to_string(type));
  }
  return static_cast<MessageType>(type);
}

Bytes Hello::encode() const {
  ByteWriter out = begin(MessageType::kHello);
  out.put(version);
  out.put(incarnation);
  out.put_string(name);
  out.put(slot_bytes);
  out.put(schemes);
  return out.take();
}

Hello Hello::decode(std::span<const std::byte> body) {
  ByteReader in(body);
  Hello m;
  m.version = in.get<uint16_t>();
  if (m.version != kProtocolVersion) {
    throw Error(StatusCode::kProtocol, "peer speaks protocol version " + std::to_string(m.version) +
                                           ", this side " + std::to_string(kProtocolVersion) +
                                           ": install the same kvxfer release on both");
  }
  m.incarnation = in.get<uint64_t>();
  m.name = in.get_string(kMaxName);
  m.slot_bytes = in.get<uint32_t>();
  m.schemes = in.get<uint32_t>();
  in.expect_end();
  return m;
}

Bytes Layout::encode() const {
  ByteWriter out = begin(MessageType::kLayout);
  out.put(cache_id);
  out.put_string(model);
  out.put(element);
  for (uint32_t field : {num_blocks, block_size, num_heads, first_head}) out.put(field);
  out.put(static_cast<uint32_t>(layers.size()));
  for (const std::string& layer : layers) out.put_string(layer);
  out.put(static_cast<uint32_t>(planes.size()));
  for (const Plane& plane : planes) {
    out.put_string(plane.name);
    out.put(plane.content);
  }
  for (const View& view : views) {
    out.put(view.offset);
    for (int64_t s : {view.block_stride, view.head_stride, view.token_stride, view.content_stride})
      out.put_signed(s);
  }
  put_floats(out, scales);
  return out.take();
}

Layout Layout::decode(std::span<const std::byte> body) {
  ByteReader in(body);
  Layout m;
  m.cache_id = in.get<uint32_t>();
  m.model = in.get_string(kMaxName);
  m.element = in.get<uint8_t>();
  m.num_blocks = in.get<uint32_t>();
  m.block_size = in.get<uint32_t>();
  m.num_heads = in.get<uint32_t>();
  m.first_head = in.get<uint32_t>();
  const auto num_layers = in.get<uint32_t>();
  in.check_count(num_layers, kMaxLayers, "a list of layers", sizeof(uint32_t));
  for (uint32_t i = 0; i < num_layers; ++i) m.layers.push_back(in.get_string(kMaxName));
  const auto num_planes = in.get<uint32_t>();
  in.check_count(num_planes, kMaxPlanes, "a list of planes", 2 * sizeof(uint32_t));
  for (uint32_t i = 0; i < num_planes; ++i) {
    Plane plane{in.get_string(kMaxName), 0};
    plane.content = in.get<uint32_t>();
    m.planes.push_back(std::move(plane));
  }
  const uint32_t num_views = num_layers * num_planes;
  in.check_count(num_views, kMaxLayers * kMaxPlanes, "a list of views", 5 * sizeof(uint64_t));
  for (uint32_t i = 0; i < num_views; ++i) {
    View view;
    view.offset = in.get<uint64_t>();
    for (int64_t* s :
         {&view.block_stride, &view.head_stride, &view.token_stride, &view.content_stride}) {
      *s = in.get_signed();
    }
    m.views.push_back(view);
  }
  m.scales = get_floats(in);
  in.expect_end();
  return m;
}

namespace {

void put_fetch(ByteWriter& out, const Fetch& m) {
  out.put(m.fetch_id);
  out.put_string(m.offer_id);
  out.put_raw(m.generation);
  out.put(m.cache_id);
  out.put_list(m.layers);
  for (uint32_t field : {m.head_begin, m.head_end, m.token_begin, m.token_end, m.slot_in_block})
    out.put(field);
  out.put(m.codec);
  out.put(m.panel_tokens);
  out.put(m.group);
  out.put(m.scale_format);
  for (uint32_t field : {m.raw_until, m.raw_from, m.unpack_rate, m.decode_rate}) out.put(field);
  out.put(m.with_digest);
  out.put(m.chunk_bytes);
  out.put(m.consumers);
  out.put_list(m.slots);
}

Fetch get_fetch(ByteReader& in) {
  Fetch m;
  m.fetch_id = in.get<uint64_t>();
  m.offer_id = in.get_string(kMaxName);
  m.generation = in.get_array<16>();
  m.cache_id = in.get<uint32_t>();
  m.layers = in.get_list(kMaxLayers);
  for (uint32_t* field :
       {&m.head_begin, &m.head_end, &m.token_begin, &m.token_end, &m.slot_in_block}) {
    *field = in.get<uint32_t>();
  }
  m.codec = in.get<uint8_t>();
  m.panel_tokens = in.get<uint16_t>();
  m.group = in.get<uint16_t>();
  m.scale_format = in.get<uint8_t>();
  for (uint32_t* field : {&m.raw_until, &m.raw_from, &m.unpack_rate, &m.decode_rate}) {
    *field = in.get<uint32_t>();
  }
  m.with_digest = in.get<uint8_t>();
  m.chunk_bytes = in.get<uint32_t>();
  m.consumers = in.get<uint32_t>();
  m.slots = in.get_list(kMaxSlots);
  return m;
}

void put_accept(ByteWriter& out, const Accept& m) {
  out.put(m.fetch_id);
  for (uint8_t axis : m.order) out.put(axis);
  out.put(m.per_layer);
  out.put(m.num_chunks);
  out.put(m.wire_bytes);
  out.put(m.producer_block_size);
  out.put(m.producer_slot);
  out.put(m.codec);
  out.put(m.element);
  out.put(m.panel_tokens);
  out.put(static_cast<uint32_t>(m.encodings.size()));
  for (const PlaneEncoding& encoding : m.encodings) {
    out.put(encoding.scheme);
    out.put(encoding.scale_format);
    out.put(encoding.group);
  }
  out.put(m.raw_until);
  out.put(m.raw_from);
  put_floats(out, m.scales);
  out.put_string(m.why.substr(0, kMaxText));
}

Accept get_accept(ByteReader& in) {
  Accept m;
  m.fetch_id = in.get<uint64_t>();
  unsigned seen = 0;
  for (uint8_t& axis : m.order) {
    axis = in.get<uint8_t>();
    if (axis >= m.order.size() || (seen & 1u << axis)) {
      throw Error(StatusCode::kProtocol,
                  "ACCEPT names a wire order that is no permutation of the five axes");
    }
    seen |= 1u << axis;
  }
  m.per_layer = in.get<uint8_t>();
  m.num_chunks = in.get<uint32_t>();
  m.wire_bytes = in.get<uint64_t>();
  m.producer_block_size = in.get<uint32_t>();
  m.producer_slot = in.get<uint32_t>();
  if (m.producer_slot >= m.producer_block_size) {
    throw Error(StatusCode::kProtocol, "ACCEPT names slot " + std::to_string(m.producer_slot) +
                                           " of a block of " +
                                           std::to_string(m.producer_block_size));
  }
  m.codec = in.get<uint8_t>();
  m.element = in.get<uint8_t>();
  m.panel_tokens = in.get<uint16_t>();
  const auto num_encodings = in.get<uint32_t>();
  in.check_count(num_encodings, kMaxPlanes, "a list of encodings", sizeof(uint32_t));
  for (uint32_t i = 0; i < num_encodings; ++i) {
    PlaneEncoding encoding;
    encoding.scheme = in.get<uint8_t>();
    encoding.scale_format = in.get<uint8_t>();
    encoding.group = in.get<uint16_t>();
    m.encodings.push_back(encoding);
  }
  m.raw_until = in.get<uint32_t>();
  m.raw_from = in.get<uint32_t>();
  m.scales = get_floats(in);
  m.why = in.get_string(kMaxText);
  return m;
}

}  // namespace

Bytes Fetch::encode() const {
  ByteWriter out = begin(MessageType::kFetch);
  put_fetch(out, *this);
  return out.take();
}

Fetch Fetch::decode(std::span<const std::byte> body) {
  ByteReader in(body);
  Fetch m = get_fetch(in);
  in.expect_end();
  return m;
}

Bytes Accept::encode() const {
  ByteWriter out = begin(MessageType::kAccept);
  put_accept(out, *this);
  return out.take();
}

Accept Accept::decode(std::span<const std::byte> body) {
  ByteReader in(body);
  Accept m = get_accept(in);
  in.expect_end();
  return m;
}

Bytes Memory::encode() const {
  ByteWriter out = begin(MessageType::kMemory);
  out.put(cache_id);
  out.put(static_cast<uint32_t>(keys.size()));
  out.put_raw(keys);
  return out.take();
}

Memory Memory::decode(std::span<const std::byte> body) {
  ByteReader in(body);
  Memory m;
  m.cache_id = in.get<uint32_t>();
  const std::string keys = in.get_string(kMaxKeys);
  const auto bytes = std::as_bytes(std::span(keys));
  m.keys.assign(bytes.begin(), bytes.end());
  in.expect_end();
  return m;
}

Bytes FetchDirect::encode() const {
  ByteWriter out = begin(MessageType::kFetchDirect);
  put_fetch(out, fetch);
  out.put(path);
  out.put_list(blocks);
  return out.take();
}

FetchDirect FetchDirect::decode(std::span<const std::byte> body) {
  ByteReader in(body);
  FetchDirect m;
  m.fetch = get_fetch(in);
  m.path = in.get<uint8_t>();
  if (m.path != kAuto && m.path != kDirect) {
    throw Error(StatusCode::kProtocol, "FETCH_DIRECT names the path " + std::to_string(m.path));
  }
  m.blocks = in.get_list(kMaxBlocks);
  in.expect_end();
  return m;
}

Bytes AcceptDirect::encode() const {
  ByteWriter out = begin(MessageType::kAcceptDirect);
  put_accept(out, accept);
  out.put(direct);
  out.put_string(path_why.substr(0, kMaxText));
  return out.take();
}

AcceptDirect AcceptDirect::decode(std::span<const std::byte> body) {
  ByteReader in(body);
  AcceptDirect m;
  m.accept = get_accept(in);
  m.direct = in.get<uint8_t>();
  if (m.direct > 1) throw Error(StatusCode::kProtocol, "ACCEPT_DIRECT is neither yes nor no");
  m.path_why = in.get_string(kMaxText);
  in.expect_end();
  return m;
}

Bytes Commit::encode() const {
  ByteWriter out = begin(MessageType::kCommit);
  out.put(fetch_id);
  for (uint32_t field : {chunk, slot, bytes}) out.put(field);
  out.put(digest.sum);
  out.put(digest.mix);
  return out.take();
}

Commit Commit::decode(std::span<const std::byte> body) {
  ByteReader in(body);
  Commit m;
  m.fetch_id = in.get<uint64_t>();
  for (uint32_t* field : {&m.chunk, &m.slot, &m.bytes}) *field = in.get<uint32_t>();
  m.digest.sum = in.get<uint64_t>();
  m.digest.mix = in.get<uint64_t>();
  in.expect_end();
  return m;
}

Bytes Refused::encode() const {
  ByteWriter out = begin(MessageType::kRefused);
  out.put(fetch_id);
  out.put(static_cast<uint8_t>(code));
  out.put_string(reason.substr(0, kMaxText));
  out.put(retry_ms);
  return out.take();
}

Refused Refused::decode(std::span<const std::byte> body) {
  ByteReader in(body);
  Refused m;
  m.fetch_id = in.get<uint64_t>();
  m.code = checked_code(in.get<uint8_t>());
  m.reason = in.get_string(kMaxText);
  m.retry_ms = in.get<uint32_t>();
  in.expect_end();
  return m;
}

Bytes Credit::encode() const {
  ByteWriter out = begin(MessageType::kCredit);
  out.put(fetch_id);
  out.put_list(slots);
  return out.take();
}

Credit Credit::decode(std::span<const std::byte> body) {
  ByteReader in(body);
  Credit m;
  m.fetch_id = in.get<uint64_t>();
  m.slots = in.get_list(kMaxSlots);
  in.expect_end();
  return m;
}

Bytes Want::encode() const {
  ByteWriter out = begin(MessageType::kWant);
  out.put(fetch_id);
  out.put(chunks);
  return out.take();
}

Want Want::decode(std::span<const std::byte> body) {
  ByteReader in(body);
  Want m;
  m.fetch_id = in.get<uint64_t>();
  m.chunks = in.get<uint32_t>();
  in.expect_end();
  return m;
}

Bytes encode_fetch_id(MessageType type, uint64_t fetch_id) {
  ByteWriter out = begin(type);
  out.put(fetch_id);
  return out.take();
}

uint64_t decode_fetch_id(std::span<const std::byte> body) {
  ByteReader in(body);
  const auto fetch_id = in.get<uint64_t>();
  in.expect_end();
  return fetch_id;
}

Bytes Renew::encode() const {
  ByteWriter out = begin(MessageType::kRenew);
  out.put_string(offer_id);
  out.put_raw(generation);
  return out.take();
}

Renew Renew::decode(std::span<const std::byte> body) {
  ByteReader in(body);
  Renew m;
  m.offer_id = in.get_string(kMaxName);
  m.generation = in.get_array<16>();
  in.expect_end();
  return m;
}

Bytes Decline::encode() const {
  ByteWriter out = begin(MessageType::kDecline);
  out.put(fetch_id);
  out.put_string(offer_id);
  out.put_raw(generation);
  out.put(cache_id);
  out.put(consumers);
  out.put(given_up);
  return out.take();
}

Decline Decline::decode(std::span<const std::byte> body) {
  ByteReader in(body);
  Decline m;
  m.fetch_id = in.get<uint64_t>();
  m.offer_id = in.get_string(kMaxName);
  m.generation = in.get_array<16>();
  m.cache_id = in.get<uint32_t>();
  m.consumers = in.get<uint32_t>();
  m.given_up = in.get<uint8_t>();
  in.expect_end();
  return m;
}

Bytes encode_ping() { return begin(MessageType::kPing).take(); }

void decode_ping(std::span<const std::byte> body) { ByteReader(body).expect_end(); }

Bytes encode_bye(const std::string& reason) {
  ByteWriter out = begin(MessageType::kBye);
  out.put_string(reason.substr(0, kMaxText));
  return out.take();
}

std::string decode_bye(std::span<const std::byte> body) {
  ByteReader in(body);
  std::string reason = in.get_string(kMaxText);
  in.expect_end();
  return reason;
}

}  // namespace kvxfer::wire
