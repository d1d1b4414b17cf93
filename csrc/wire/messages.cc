#include "wire/messages.h"

#include <string>

#include "wire/message_io.h"

namespace kvxfer::wire {
namespace {

StatusCode checked_code(uint8_t code) {
  if (code == 0 || code > static_cast<uint8_t>(kLastStatus)) {
    throw Error(StatusCode::kProtocol,
                "REFUSED carries the unknown status " + std::to_string(code));
  }
  return static_cast<StatusCode>(code);
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
