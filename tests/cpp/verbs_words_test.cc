// What the two ends of a link over RDMA say about themselves: what is decoded is all that was said.

#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "fuzz_corpus.h"
#include "kvxfer/status.h"
#include "transport/verbs/address.h"
#include "transport/verbs/control.h"

extern "C" int kvxfer_corpus_endpoint(const uint8_t* data, size_t size);

namespace kvxfer::ibv {
namespace {

TEST_CASE("verbs words: those of the fuzzer's corpus are decoded or refused") {
  CHECK(run_corpus("endpoint", kvxfer_corpus_endpoint) > 100);
}

template <typename Message>
bool refused(const std::vector<std::byte>& bytes) {
  try {
    (void)Message::decode(bytes);
  } catch (const Error& error) {
    CHECK(error.code() == StatusCode::kProtocol);
    return true;
  }
  return false;
}

TEST_CASE("verbs words: a path's queue pair has numbers of 24 bits") {
  PathMessage message;
  message.kind = PathMessage::kOpen;
  message.qp = {0xffffff, 0xffffff};
  message.reason = "because";
  CHECK(PathMessage::decode(message.encode()).encode() == message.encode());
  for (const QpAddress& qp :
       {QpAddress{0x1000000, 0}, QpAddress{0, 0x1000000}, QpAddress{UINT32_MAX, UINT32_MAX}}) {
    message.qp = qp;
    CHECK(refused<PathMessage>(message.encode()));
  }
}

TEST_CASE("verbs words: a link layer is Ethernet or it is not") {
  EndpointAddress address;
  RailAddress rail;
  rail.name = "rail";
  rail.mtu = 3;
  rail.ethernet = true;
  address.rails = {rail};
  std::vector<std::byte> bytes = address.encode();
  CHECK(EndpointAddress::decode(bytes).encode() == bytes);
  const size_t at = 4 + 3 * 8 + 4 + 4 + rail.name.size();
  REQUIRE(bytes[at] == std::byte{1});
  for (const int other : {2, 128, 255}) {
    bytes[at] = static_cast<std::byte>(other);
    CHECK(refused<EndpointAddress>(bytes));
  }
}

}  // namespace
}  // namespace kvxfer::ibv
