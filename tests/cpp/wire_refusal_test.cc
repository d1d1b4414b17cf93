// Messages that no correct peer sends.

#include <doctest/doctest.h>

#include <map>
#include <string>
#include <vector>

#include "golden_messages.h"

namespace kvxfer::wire {
namespace {

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
    case MessageType::kGpuArena: GpuArena::decode(body); return;
    case MessageType::kFetchGpu: FetchGpu::decode(body); return;
    case MessageType::kAcceptGpu: AcceptGpu::decode(body); return;
    case MessageType::kGpuClosed: decode_gpu_closed(body); return;
    case MessageType::kGpuTrial: GpuTrial::decode(body); return;
    case MessageType::kGpuTried: GpuTried::decode(body); return;
    case MessageType::kGpuCaches: decode_gpu_caches(body); return;
  }
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
  for (const int type : {0, 27, 28, 128, 255}) {
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
  AcceptGpu gpu = kAcceptGpu;
  gpu.gpu = 2;
  CHECK_THROWS_AS(decode_any(gpu.encode()), Error);
  GpuArena arena = kGpuArena;
  arena.vendor = 2;
  CHECK_THROWS_AS(decode_any(arena.encode()), Error);
  arena = kGpuArena;
  arena.pci.assign(kMaxPci + 1, 'x');
  CHECK_THROWS_AS(decode_any(arena.encode()), Error);
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
    if (!message.empty())
      message[0] = static_cast<std::byte>(1 + i % static_cast<int>(kLastMessage));
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
