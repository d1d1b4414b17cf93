// Every control message: what is decoded encodes to the very same bytes; anything else is refused.

#include <cstddef>
#include <cstdint>
#include <span>

#include "check.h"
#include "wire/messages.h"

namespace {

using kvxfer::wire::Bytes;
using kvxfer::wire::MessageType;

template <typename Message>
Bytes again(std::span<const std::byte> body) {
  return Message::decode(body).encode();
}

Bytes again(MessageType type, std::span<const std::byte> body) {
  namespace wire = kvxfer::wire;
  switch (type) {
    case MessageType::kHello: return again<wire::Hello>(body);
    case MessageType::kLayout: return again<wire::Layout>(body);
    case MessageType::kFetch: return again<wire::Fetch>(body);
    case MessageType::kAccept: return again<wire::Accept>(body);
    case MessageType::kCommit: return again<wire::Commit>(body);
    case MessageType::kRefused: return again<wire::Refused>(body);
    case MessageType::kCredit: return again<wire::Credit>(body);
    case MessageType::kWant: return again<wire::Want>(body);
    case MessageType::kRenew: return again<wire::Renew>(body);
    case MessageType::kDecline: return again<wire::Decline>(body);
    case MessageType::kMemory: return again<wire::Memory>(body);
    case MessageType::kFetchDirect: return again<wire::FetchDirect>(body);
    case MessageType::kAcceptDirect: return again<wire::AcceptDirect>(body);
    case MessageType::kGpuArena: return again<wire::GpuArena>(body);
    case MessageType::kFetchGpu: return again<wire::FetchGpu>(body);
    case MessageType::kAcceptGpu: return again<wire::AcceptGpu>(body);
    case MessageType::kGpuClosed: wire::decode_gpu_closed(body); return wire::encode_gpu_closed();
    case MessageType::kGpuTrial: return again<wire::GpuTrial>(body);
    case MessageType::kGpuTried: return again<wire::GpuTried>(body);
    case MessageType::kGpuCaches: wire::decode_gpu_caches(body); return wire::encode_gpu_caches();
    case MessageType::kDeclined:
    case MessageType::kDone:
    case MessageType::kCancel:
    case MessageType::kCancelled: return wire::encode_fetch_id(type, wire::decode_fetch_id(body));
    case MessageType::kPing: wire::decode_ping(body); return wire::encode_ping();
    case MessageType::kBye: return wire::encode_bye(wire::decode_bye(body));
    default: return {};
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::span<const std::byte> message(reinterpret_cast<const std::byte*>(data), size);
  refused_or([&] {
    const MessageType type = kvxfer::wire::type_of(message);
    const Bytes bytes = again(type, message.subspan(1));
    check(bytes.empty() || std::ranges::equal(bytes, message), "encodes to other bytes");
  });
  return 0;
}
