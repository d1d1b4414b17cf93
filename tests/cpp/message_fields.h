#ifndef KVXFER_TESTS_MESSAGE_FIELDS_H_
#define KVXFER_TESTS_MESSAGE_FIELDS_H_

#include "wire/messages.h"

namespace kvxfer::testing {

// visit(message, f) calls f with each field of a message, those of its parts too. A field that is
// added to a message and not here does not compile.

template <typename F>
void visit(wire::Hello& m, F&& f) {
  auto& [version, incarnation, name, slot_bytes, schemes] = m;
  f(version), f(incarnation), f(name), f(slot_bytes), f(schemes);
}

template <typename F>
void visit(wire::View& m, F&& f) {
  auto& [offset, block, head, token, content] = m;
  f(offset), f(block), f(head), f(token), f(content);
}

template <typename F>
void visit(wire::Layout::Plane& m, F&& f) {
  auto& [name, content] = m;
  f(name), f(content);
}

template <typename F>
void visit(wire::Layout& m, F&& f) {
  auto& [cache_id, model, element, num_blocks, block_size, num_heads, first_head, layers, planes,
         views, scales] = m;
  f(cache_id), f(model), f(element), f(num_blocks), f(block_size), f(num_heads), f(first_head);
  f(layers), f(planes), f(views), f(scales);
}

template <typename F>
void visit(wire::Fetch& m, F&& f) {
  auto& [fetch_id, offer_id, generation, cache_id, layers, head_begin, head_end, token_begin,
         token_end, slot_in_block, codec, panel_tokens, group, scale_format, raw_until, raw_from,
         unpack_rate, decode_rate, with_digest, chunk_bytes, consumers, slots] = m;
  f(fetch_id), f(offer_id), f(generation), f(cache_id), f(layers), f(head_begin), f(head_end);
  f(token_begin), f(token_end), f(slot_in_block), f(codec), f(panel_tokens), f(group);
  f(scale_format), f(raw_until), f(raw_from), f(unpack_rate), f(decode_rate), f(with_digest);
  f(chunk_bytes), f(consumers), f(slots);
}

template <typename F>
void visit(wire::PlaneEncoding& m, F&& f) {
  auto& [scheme, scale_format, group] = m;
  f(scheme), f(scale_format), f(group);
}

template <typename F>
void visit(wire::Accept& m, F&& f) {
  auto& [fetch_id, order, per_layer, num_chunks, wire_bytes, block_size, slot, codec, element,
         panel_tokens, encodings, raw_until, raw_from, scales, why] = m;
  f(fetch_id), f(order), f(per_layer), f(num_chunks), f(wire_bytes), f(block_size), f(slot);
  f(codec), f(element), f(panel_tokens), f(encodings), f(raw_until), f(raw_from), f(scales), f(why);
}

template <typename F>
void visit(wire::Commit& m, F&& f) {
  auto& [fetch_id, chunk, slot, bytes, digest] = m;
  f(fetch_id), f(chunk), f(slot), f(bytes), f(digest.sum), f(digest.mix);
}

template <typename F>
void visit(wire::Refused& m, F&& f) {
  auto& [fetch_id, code, reason, retry_ms] = m;
  f(fetch_id), f(code), f(reason), f(retry_ms);
}

template <typename F>
void visit(wire::Credit& m, F&& f) {
  auto& [fetch_id, slots] = m;
  f(fetch_id), f(slots);
}

template <typename F>
void visit(wire::Want& m, F&& f) {
  auto& [fetch_id, chunks] = m;
  f(fetch_id), f(chunks);
}

template <typename F>
void visit(wire::Decline& m, F&& f) {
  auto& [fetch_id, offer_id, generation, cache_id, consumers, given_up] = m;
  f(fetch_id), f(offer_id), f(generation), f(cache_id), f(consumers), f(given_up);
}

template <typename F>
void visit(wire::Renew& m, F&& f) {
  auto& [offer_id, generation] = m;
  f(offer_id), f(generation);
}

// DONE, CANCEL, CANCELLED and DECLINED.
struct OfFetch {
  wire::MessageType type = wire::MessageType::kDone;
  uint64_t fetch_id = 0;
  wire::Bytes encode() const { return wire::encode_fetch_id(type, fetch_id); }
};

template <typename F>
void visit(OfFetch& m, F&& f) {
  f(m.fetch_id);
}

struct Bye {
  std::string reason;
  wire::Bytes encode() const { return wire::encode_bye(reason); }
};

template <typename F>
void visit(Bye& m, F&& f) {
  f(m.reason);
}

struct Ping {
  wire::Bytes encode() const { return wire::encode_ping(); }
};

template <typename F>
void visit(Ping&, F&&) {}

}  // namespace kvxfer::testing

#endif  // KVXFER_TESTS_MESSAGE_FIELDS_H_
