#include "wire/messages.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

namespace kvxfer::wire {
namespace {

using Body = std::span<const std::byte>;
using Decoder = std::function<void(Body)>;

constexpr uint64_t kId = 0x0102030405060708;

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

Generation generation_from(uint8_t first) {
  Generation generation;
  for (std::byte& value : generation) value = std::byte{first++};
  return generation;
}

// The values behind tests/golden/wire_v4.txt.
const Hello kHello{4, 0x1122334455667788, "prefill-0", 1u << 20, 31};
const Layout kLayout{7,
                     "llama",
                     2,
                     1000,
                     16,
                     8,
                     24,
                     {"layers.0", "layers.1"},
                     {{"k", 128}, {"v", 64}},
                     {{0, 65536, 4096, 256, 2},
                      {0x100000000, 65536, 4096, 256, 2},
                      {0x20, -1, int64_t{1} << 40, -(int64_t{1} << 40), 2},
                      {UINT64_MAX, 3, 4, 5, 6}},
                     {1.0f, 0.5f, 1.0f / 3, std::numeric_limits<float>::max()}};
const Fetch kFetch{kId,
                   "request-42",
                   generation_from(0xa0),
                   7,
                   {0, 1, 0xabcdef},
                   24,
                   32,
                   512,
                   4097,
                   15,
                   3,
                   64,
                   128,
                   1,
                   4,
                   3097,
                   8000,
                   3000,
                   1,
                   1u << 20,
                   2,
                   {5, 4, 3}};
const Accept kAccept{kId, {2, 0, 1, 4, 3},          1, 33,   0x123456789a,   32,        31, 3, 2,
                     48,  {{4, 0, 0}, {3, 1, 128}}, 4, 3097, {0.125f, 2.0f}, "as asked"};
const Commit kCommit{kId, 32, 3, 0xfedcb, {0xdeadbeefcafef00d, 0x0badc0de12345678}};
const Refused kRefused{kId, StatusCode::kBusy, "try again", 1500};
const Credit kCredit{kId, {9, 0, 127}};
const Decline kDecline{kId, "request-42", generation_from(0xa0), 7, 4, 1};
const Memory kMemory{7, {std::byte{0xab}, std::byte{0xcd}, std::byte{0xef}}};
const FetchDirect kFetchDirect{kFetch, FetchDirect::kDirect, {70, 0, 999}};
const AcceptDirect kAcceptDirect{kAccept, 1, "as set"};
const Renew kRenew{"request-42", generation_from(0xa0)};

Bytes from_hex(const std::string& text) {
  REQUIRE(text.size() % 2 == 0);
  Bytes bytes;
  for (size_t i = 0; i < text.size(); i += 2) {
    bytes.push_back(static_cast<std::byte>(std::stoul(text.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

const std::map<std::string, Bytes>& golden() {
  static const auto messages = [] {
    const auto path = std::filesystem::path(KVXFER_TESTS_GOLDEN) / "wire_v4.txt";
    std::ifstream file(path);
    REQUIRE_MESSAGE(file.good(), path.string(), " cannot be read");
    std::map<std::string, Bytes> found;
    std::string name;
    for (std::string line; std::getline(file, line);) {
      line = line.substr(0, line.find('#'));
      line.erase(line.find_last_not_of(' ') + 1);
      if (line.empty()) continue;
      if (line.front() == '[') {
        name = line.substr(1, line.size() - 2);
        continue;
      }
      const Bytes bytes = from_hex(line);
      found[name].insert(found[name].end(), bytes.begin(), bytes.end());
    }
    return found;
  }();
  return messages;
}

Body body_of(const Bytes& message) { return Body(message).subspan(1); }

std::string protocol_error(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    CHECK(error.code() == StatusCode::kProtocol);
    return error.what();
  }
  return "";
}

// How the agent takes a message apart.
void decode_any(Body message) {
  const Body body = message.empty() ? message : message.subspan(1);
  switch (type_of(message)) {
    case MessageType::kHello: Hello::decode(body); return;
    case MessageType::kLayout: Layout::decode(body); return;
    case MessageType::kFetch: Fetch::decode(body); return;
    case MessageType::kAccept: Accept::decode(body); return;
    case MessageType::kCommit: Commit::decode(body); return;
    case MessageType::kRefused: Refused::decode(body); return;
    case MessageType::kCredit: Credit::decode(body); return;
    case MessageType::kDone:
    case MessageType::kCancel:
    case MessageType::kCancelled:
    case MessageType::kDeclined: decode_fetch_id(body); return;
    case MessageType::kDecline: Decline::decode(body); return;
    case MessageType::kPing: decode_ping(body); return;
    case MessageType::kRenew: Renew::decode(body); return;
    case MessageType::kBye: decode_bye(body); return;
    case MessageType::kWant: Want::decode(body); return;
    case MessageType::kMemory: Memory::decode(body); return;
    case MessageType::kFetchDirect: FetchDirect::decode(body); return;
    case MessageType::kAcceptDirect: AcceptDirect::decode(body); return;
  }
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

class Random {
 public:
  template <class T>
  T number() {
    // Extremes and small values are met as often as everything between.
    const uint64_t value = engine_();
    switch (engine_() % 4) {
      case 0: return static_cast<T>(0);
      case 1: return static_cast<T>(UINT64_MAX);
      case 2: return static_cast<T>(value % 100);
      default: return static_cast<T>(value);
    }
  }
  size_t below(size_t limit) { return engine_() % limit; }
  std::string text(size_t limit) {
    std::string text(below(limit + 1), '\0');
    for (char& c : text) c = static_cast<char>(engine_());
    return text;
  }
  std::vector<uint32_t> list(size_t limit) {
    std::vector<uint32_t> list(below(limit + 1));
    for (uint32_t& value : list) value = number<uint32_t>();
    return list;
  }
  std::vector<float> floats(size_t limit) {
    std::vector<float> list;
    for (const uint32_t bits : this->list(limit)) list.push_back(std::bit_cast<float>(bits));
    return list;
  }
  Generation generation() {
    Generation generation;
    for (std::byte& value : generation) value = static_cast<std::byte>(engine_());
    return generation;
  }
  template <class Range>
  void shuffle(Range& range) {
    std::shuffle(range.begin(), range.end(), engine_);
  }

 private:
  std::mt19937_64 engine_{20240817};
};

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

TEST_CASE("a message that ends early is refused, wherever it ends") {
  for (const auto& [name, message] : golden()) {
    for (size_t size = 0; size < message.size(); ++size) {
      CAPTURE(name);
      CAPTURE(size);
      CHECK_THROWS_AS(decode_any(Body(message).first(size)), Error);
    }
  }
}

TEST_CASE("a message with a byte too many is refused") {
  for (const auto& [name, message] : golden()) {
    for (int extra = 0; extra < 256; ++extra) {
      CAPTURE(name);
      Bytes longer = message;
      longer.push_back(static_cast<std::byte>(extra));
      CHECK(protocol_error([&] { decode_any(longer); }) == "message has 1 bytes too many");
    }
  }
}

TEST_CASE("counts are bounded before anything is allocated for them") {
  // Where the counts of strings and lists are, in bytes from the start of the golden message.
  const std::map<std::string, std::vector<size_t>> counts = {
      {"hello", {11}},    {"layout", {5, 31, 35, 47, 59, 63, 72, 241}},
      {"fetch", {9, 43}}, {"accept", {39, 59, 71}},
      {"refused", {10}},  {"credit", {9}},
      {"renew", {1}},     {"bye", {1}},
      {"decline", {9}}};
  for (const auto& [name, offsets] : counts) {
    for (const size_t offset : offsets) {
      for (const uint32_t count : {UINT32_MAX, 0x80000000u, 0x40000000u, 0x10000000u, 0x100000u}) {
        CAPTURE(name);
        CAPTURE(offset);
        CAPTURE(count);
        Bytes message = golden().at(name);
        for (size_t i = 0; i < 4; ++i) {
          message[offset + i] = static_cast<std::byte>(count >> 8 * i & 0xff);
        }
        const std::string error = protocol_error([&] { decode_any(message); });
        CHECK(error.find(std::to_string(count)) != std::string::npos);
      }
    }
  }
}

TEST_CASE("layers times planes is bounded, too") {
  Layout layout{1, "", 0, 1, 1, 1, 0, {}, {}, {}, {}};
  layout.layers.assign(kMaxLayers, "x");
  layout.planes.assign(kMaxPlanes, {"p", 1});
  layout.views.assign(10, {});
  CHECK_THROWS_AS(decode_any(layout.encode()), Error);
  layout.layers.push_back("one too many");
  CHECK_THROWS_AS(decode_any(layout.encode()), Error);
}

TEST_CASE("names and reasons beyond their limits are refused") {
  const std::string name(kMaxName + 1, 'x');
  CHECK_THROWS_AS(decode_any(Hello{1, 1, name, 1, 1}.encode()), Error);
  CHECK_THROWS_AS(decode_any(Renew{name, {}}.encode()), Error);
  CHECK_THROWS_AS(decode_any(Layout{1, name, 0, 1, 1, 1, 0, {}, {}, {}, {}}.encode()), Error);
  CHECK_THROWS_AS(decode_any(Credit{1, std::vector<uint32_t>(kMaxSlots + 1)}.encode()), Error);
}

TEST_CASE("an unknown message type is named") {
  CHECK(protocol_error([] { type_of({}); }) == "empty message");
  for (const int type : {0, 20, 21, 128, 255}) {
    const Bytes message{static_cast<std::byte>(type)};
    CHECK(protocol_error([&] { type_of(message); }) ==
          "unknown message type " + std::to_string(type));
  }
}

TEST_CASE("a peer of another protocol version is told both") {
  for (const int version : {0, 1, 2, 3, 5, 0x0100, 0xffff}) {
    Hello hello = kHello;
    hello.version = static_cast<uint16_t>(version);
    const Bytes message = hello.encode();
    const std::string error = protocol_error([&] { Hello::decode(body_of(message)); });
    CHECK(error.find("version " + std::to_string(version) + ",") != std::string::npos);
    CHECK(error.find("this side " + std::to_string(kProtocolVersion)) != std::string::npos);
  }
  // Only the version field of HELLO may be relied upon: what is behind it can be anything.
  const Bytes from_the_future = from_hex("010500ff");
  CHECK(protocol_error([&] { Hello::decode(body_of(from_the_future)); }).find("version 5") !=
        std::string::npos);
}

TEST_CASE("ACCEPT must name a permutation of the axes and a slot inside the block") {
  const auto refused = [](auto change) {
    Accept accept = kAccept;
    change(accept);
    const Bytes message = accept.encode();
    return !protocol_error([&] { Accept::decode(body_of(message)); }).empty();
  };
  CHECK(!refused([](Accept&) {}));
  CHECK(refused([](Accept& m) { m.order = {0, 1, 2, 3, 5}; }));
  CHECK(refused([](Accept& m) { m.order = {0, 1, 2, 3, 3}; }));
  CHECK(refused([](Accept& m) { m.order = {0, 1, 2, 3, 36}; }));
  CHECK(refused([](Accept& m) { m.order = {255, 1, 2, 3, 4}; }));
  CHECK(refused([](Accept& m) { m.producer_slot = m.producer_block_size; }));
  CHECK(refused([](Accept& m) { m.producer_block_size = 0; }));
}

TEST_CASE("only paths that there are can be asked for and answered") {
  for (const int path : {0, 3, 255}) {
    FetchDirect fetch = kFetchDirect;
    fetch.path = static_cast<uint8_t>(path);
    CHECK_THROWS_AS(decode_any(fetch.encode()), Error);
  }
  AcceptDirect accept = kAcceptDirect;
  accept.direct = 2;
  CHECK_THROWS_AS(decode_any(accept.encode()), Error);
  CHECK_THROWS_AS(decode_any(Memory{1, Bytes(kMaxKeys + 1)}.encode()), Error);
}

TEST_CASE("REFUSED cannot carry OK or a status that is not known") {
  for (const int code : {0, 15, 16, 255}) {
    const Bytes message = Refused{kId, static_cast<StatusCode>(code), "x"}.encode();
    CHECK(protocol_error([&] { Refused::decode(body_of(message)); }).find(std::to_string(code)) !=
          std::string::npos);
  }
}

TEST_CASE("random bytes are refused or decoded, nothing else") {
  Random random;
  size_t decoded = 0, refused = 0;
  for (int i = 0; i < 40000; ++i) {
    Bytes message(random.below(200));
    for (std::byte& value : message) value = random.number<std::byte>();
    if (!message.empty()) message[0] = static_cast<std::byte>(1 + i % 19);
    try {
      decode_any(message);
      ++decoded;
    } catch (const Error& error) {
      REQUIRE(error.code() == StatusCode::kProtocol);
      ++refused;
    }
  }
  CHECK(decoded > 0);
  CHECK(refused > 30000);
}

TEST_CASE("golden messages with changed bytes are refused or decoded, nothing else") {
  Random random;
  for (const auto& [name, message] : golden()) {
    for (int i = 0; i < 2000; ++i) {
      Bytes changed = message;
      for (size_t changes = 1 + random.below(4); changes-- > 0;) {
        changed[random.below(changed.size())] = random.number<std::byte>();
      }
      try {
        decode_any(changed);
      } catch (const Error& error) {
        REQUIRE(error.code() == StatusCode::kProtocol);
      }
    }
  }
}

}  // namespace
}  // namespace kvxfer::wire
