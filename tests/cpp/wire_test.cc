// Messages as they are encoded and decoded.

#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "golden_messages.h"

namespace kvxfer::wire {
namespace {

// Structured bindings name every field: one that is added does not compile until it is tested here.
auto fields(const Hello& m) {
  const auto& [version, incarnation, name, slot_bytes, schemes] = m;
  return std::tie(version, incarnation, name, slot_bytes, schemes);
}
auto fields(const View& m) {
  const auto& [offset, block, head, token, content] = m;
  return std::tie(offset, block, head, token, content);
}
auto fields(const Layout::Plane& m) {
  const auto& [name, content] = m;
  return std::tie(name, content);
}
auto fields(const PlaneEncoding& m) {
  const auto& [scheme, scale_format, group] = m;
  return std::tie(scheme, scale_format, group);
}
template <class T>
auto all_fields(const std::vector<T>& list) {
  std::vector<decltype(fields(list[0]))> all;
  for (const T& item : list) all.push_back(fields(item));
  return all;
}
// NaNs compare as what they are.
std::vector<uint32_t> bits(const std::vector<float>& values) {
  std::vector<uint32_t> all;
  for (const float value : values) all.push_back(std::bit_cast<uint32_t>(value));
  return all;
}
auto fields(const Layout& m) {
  const auto& [cache, model, element, blocks, size, heads, first, layers, planes, views, scales] =
      m;
  return std::tuple(cache, model, element, blocks, size, heads, first, layers, all_fields(planes),
                    all_fields(views), bits(scales));
}
auto fields(const Fetch& m) {
  const auto& [id, offer, generation, cache, layers, head, head_end, token, token_end, slot, codec,
               panel, group, scale, until, from, unpack, decode, digest, chunk, consumers, slots] =
      m;
  return std::tie(id, offer, generation, cache, layers, head, head_end, token, token_end, slot,
                  codec, panel, group, scale, until, from, unpack, decode, digest, chunk, consumers,
                  slots);
}
auto fields(const Accept& m) {
  const auto& [id, order, per_layer, chunks, bytes, block_size, slot, codec, element, panel,
               encodings, until, from, scales, why] = m;
  return std::tuple(id, order, per_layer, chunks, bytes, block_size, slot, codec, element, panel,
                    all_fields(encodings), until, from, bits(scales), why);
}
auto fields(const Memory& m) {
  const auto& [cache, keys] = m;
  return std::tie(cache, keys);
}
auto fields(const FetchDirect& m) {
  const auto& [fetch, path, blocks] = m;
  return std::tuple(fields(fetch), path, blocks);
}
auto fields(const AcceptDirect& m) {
  const auto& [accept, direct, why] = m;
  return std::tuple(fields(accept), direct, why);
}
auto fields(const GpuArena& m) {
  const auto& [arena, vendor, uuid, pci, bytes, mailbox, stamp, handle] = m;
  return std::tie(arena, vendor, uuid, pci, bytes, mailbox, stamp, handle);
}
auto fields(const FetchGpu& m) {
  const auto& [fetch, arena] = m;
  return std::tuple(fields(fetch), arena);
}
auto fields(const AcceptGpu& m) {
  const auto& [accept, gpu, why] = m;
  return std::tuple(fields(accept), gpu, why);
}
auto fields(const GpuTrial& m) {
  const auto& [arena, trial] = m;
  return std::tie(arena, trial);
}
auto fields(const GpuTried& m) {
  const auto& [arena, trial, problem] = m;
  return std::tie(arena, trial, problem);
}
auto fields(const Commit& m) {
  const auto& [id, chunk, slot, bytes, digest] = m;
  return std::tie(id, chunk, slot, bytes, digest.sum, digest.mix);
}
auto fields(const Refused& m) {
  const auto& [id, code, reason, retry] = m;
  return std::tie(id, code, reason, retry);
}
auto fields(const Credit& m) {
  const auto& [id, slots] = m;
  return std::tie(id, slots);
}
auto fields(const Want& m) {
  const auto& [id, chunks] = m;
  return std::tie(id, chunks);
}
auto fields(const Decline& m) {
  const auto& [id, offer, generation, cache, consumers, given_up] = m;
  return std::tie(id, offer, generation, cache, consumers, given_up);
}
auto fields(const Renew& m) {
  const auto& [offer, generation] = m;
  return std::tie(offer, generation);
}

template <class Message>
void check_golden(const std::string& name, MessageType type, const Message& message) {
  CAPTURE(name);
  const Bytes& expected = golden().at(name);
  CHECK(message.encode() == expected);
  CHECK(type_of(expected) == type);
  const Message decoded = Message::decode(body_of(expected));
  CHECK((fields(decoded) == fields(message)));
}

TEST_CASE("every message is encoded as in the golden file, and decoded from it") {
  CHECK(golden().size() == static_cast<size_t>(kLastMessage));
  check_golden("memory", MessageType::kMemory, kMemory);
  check_golden("fetch_direct", MessageType::kFetchDirect, kFetchDirect);
  check_golden("accept_direct", MessageType::kAcceptDirect, kAcceptDirect);
  check_golden("gpu_arena", MessageType::kGpuArena, kGpuArena);
  check_golden("fetch_gpu", MessageType::kFetchGpu, kFetchGpu);
  check_golden("accept_gpu", MessageType::kAcceptGpu, kAcceptGpu);
  CHECK(encode_gpu_closed() == golden().at("gpu_closed"));
  check_golden("gpu_trial", MessageType::kGpuTrial, kGpuTrial);
  check_golden("gpu_tried", MessageType::kGpuTried, kGpuTried);
  CHECK(encode_gpu_caches() == golden().at("gpu_caches"));
  check_golden("hello", MessageType::kHello, kHello);
  check_golden("layout", MessageType::kLayout, kLayout);
  check_golden("fetch", MessageType::kFetch, kFetch);
  check_golden("accept", MessageType::kAccept, kAccept);
  check_golden("commit", MessageType::kCommit, kCommit);
  check_golden("refused", MessageType::kRefused, kRefused);
  check_golden("credit", MessageType::kCredit, kCredit);
  check_golden("renew", MessageType::kRenew, kRenew);
  check_golden("decline", MessageType::kDecline, kDecline);
  check_golden("want", MessageType::kWant, Want{kId, 12});
  for (const auto& [name, type] : {std::pair{"done", MessageType::kDone},
                                   {"cancel", MessageType::kCancel},
                                   {"cancelled", MessageType::kCancelled},
                                   {"declined", MessageType::kDeclined}}) {
    CAPTURE(name);
    CHECK(encode_fetch_id(type, kId) == golden().at(name));
    CHECK(type_of(golden().at(name)) == type);
    CHECK(decode_fetch_id(body_of(golden().at(name))) == kId);
  }
  CHECK(encode_ping() == golden().at("ping"));
  CHECK(type_of(golden().at("ping")) == MessageType::kPing);
  CHECK(encode_bye("restarting") == golden().at("bye"));
  CHECK(type_of(golden().at("bye")) == MessageType::kBye);
  CHECK(decode_bye(body_of(golden().at("bye"))) == "restarting");
}

TEST_CASE("status codes have the values that travel in REFUSED") {
  const std::vector<StatusCode> codes = {
      StatusCode::kCancelled, StatusCode::kTimeout,     StatusCode::kStale,
      StatusCode::kExpired,   StatusCode::kMismatch,    StatusCode::kCorrupt,
      StatusCode::kPeerLost,  StatusCode::kUnreachable, StatusCode::kClosed,
      StatusCode::kInvalid,   StatusCode::kNoResources, StatusCode::kProtocol,
      StatusCode::kWithdrawn, StatusCode::kBusy};
  for (size_t i = 0; i < codes.size(); ++i) {
    CHECK(static_cast<size_t>(codes[i]) == i + 1);
    const Bytes message = Refused{kId, codes[i], ""}.encode();
    CHECK(static_cast<size_t>(message[9]) == i + 1);
    CHECK(Refused::decode(body_of(message)).code == codes[i]);
  }
}

template <class Message>
void check_round_trip(const Message& message) {
  const Bytes bytes = message.encode();
  const Message decoded = Message::decode(body_of(bytes));
  REQUIRE((fields(decoded) == fields(message)));
  REQUIRE(decoded.encode() == bytes);
}

Layout random_layout(Random& random) {
  Layout m{random.number<uint32_t>(),
           random.text(kMaxName),
           random.number<uint8_t>(),
           random.number<uint32_t>(),
           random.number<uint32_t>(),
           random.number<uint32_t>(),
           random.number<uint32_t>(),
           {},
           {},
           {},
           random.floats(50)};
  for (size_t i = random.below(20); i-- > 0;) m.layers.push_back(random.text(40));
  for (size_t i = random.below(kMaxPlanes + 1); i-- > 0;) {
    m.planes.push_back({random.text(40), random.number<uint32_t>()});
  }
  for (size_t i = m.layers.size() * m.planes.size(); i-- > 0;) {
    m.views.push_back({random.number<uint64_t>(), random.number<int64_t>(),
                       random.number<int64_t>(), random.number<int64_t>(),
                       random.number<int64_t>()});
  }
  return m;
}

TEST_CASE("random messages survive a round trip") {
  Random random;
  for (int i = 0; i < 500; ++i) {
    check_round_trip(Hello{kProtocolVersion, random.number<uint64_t>(), random.text(kMaxName),
                           random.number<uint32_t>(), random.number<uint32_t>()});
    check_round_trip(random_layout(random));
    check_round_trip(
        Fetch{random.number<uint64_t>(), random.text(kMaxName),     random.generation(),
              random.number<uint32_t>(), random.list(300),          random.number<uint32_t>(),
              random.number<uint32_t>(), random.number<uint32_t>(), random.number<uint32_t>(),
              random.number<uint32_t>(), random.number<uint8_t>(),  random.number<uint16_t>(),
              random.number<uint16_t>(), random.number<uint8_t>(),  random.number<uint32_t>(),
              random.number<uint32_t>(), random.number<uint32_t>(), random.number<uint32_t>(),
              random.number<uint8_t>(),  random.number<uint32_t>(), random.number<uint32_t>(),
              random.list(300)});
    check_round_trip(Decline{random.number<uint64_t>(), random.text(kMaxName), random.generation(),
                             random.number<uint32_t>(), random.number<uint32_t>(),
                             random.number<uint8_t>()});
    Accept accept{random.number<uint64_t>(),
                  {0, 1, 2, 3, 4},
                  random.number<uint8_t>(),
                  random.number<uint32_t>(),
                  random.number<uint64_t>(),
                  0,
                  random.number<uint32_t>(),
                  random.number<uint8_t>(),
                  random.number<uint8_t>(),
                  random.number<uint16_t>(),
                  {},
                  random.number<uint32_t>(),
                  random.number<uint32_t>(),
                  random.floats(100),
                  random.text(kMaxText)};
    for (size_t plane = random.below(kMaxPlanes + 1); plane-- > 0;) {
      accept.encodings.push_back(
          {random.number<uint8_t>(), random.number<uint8_t>(), random.number<uint16_t>()});
    }
    random.shuffle(accept.order);
    accept.producer_block_size = std::max(random.number<uint32_t>(), 1u);
    accept.producer_slot %= accept.producer_block_size;
    check_round_trip(accept);
    check_round_trip(Commit{random.number<uint64_t>(),
                            random.number<uint32_t>(),
                            random.number<uint32_t>(),
                            random.number<uint32_t>(),
                            {random.number<uint64_t>(), random.number<uint64_t>()}});
    check_round_trip(Refused{random.number<uint64_t>(),
                             static_cast<StatusCode>(1 + random.below(14)), random.text(kMaxText),
                             random.number<uint32_t>()});
    check_round_trip(Credit{random.number<uint64_t>(), random.list(300)});
    check_round_trip(Renew{random.text(kMaxName), random.generation()});
    check_round_trip(Want{random.number<uint64_t>(), random.number<uint32_t>()});
    const std::string reason = random.text(kMaxText);
    REQUIRE(decode_bye(body_of(encode_bye(reason))) == reason);
  }
}

TEST_CASE("the largest messages that the limits allow can be sent") {
  const Refused refused{kId, StatusCode::kMismatch, std::string(3 * kMaxText, 'x')};
  CHECK(Refused::decode(body_of(refused.encode())).reason == std::string(kMaxText, 'x'));
  CHECK(decode_bye(body_of(encode_bye(std::string(3 * kMaxText, 'x')))).size() == kMaxText);

  check_round_trip(Credit{kId, std::vector<uint32_t>(kMaxSlots, 7)});
  Layout layout{1, "", 0, 1, 1, 1, 0, {}, {}, {}, {}};
  layout.layers.assign(kMaxLayers, "x");
  layout.planes.assign(kMaxPlanes, {"p", 1});
  layout.views.assign(size_t{kMaxLayers} * kMaxPlanes, {1, 2, 3, 4, 5});
  layout.scales.assign(size_t{kMaxLayers} * kMaxPlanes, 0.5f);
  check_round_trip(layout);
  CHECK(layout.encode().size() < 4u << 20);
  Accept accept = kAccept;
  accept.why.assign(3 * kMaxText, 'x');
  CHECK(Accept::decode(body_of(accept.encode())).why.size() == kMaxText);
}

}  // namespace
}  // namespace kvxfer::wire
