// What the two ends of a verbs link say about themselves and about paths.

#include <cstddef>
#include <cstdint>
#include <span>

#include "check.h"
#include "transport/verbs/address.h"
#include "transport/verbs/control.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(data) + 1, size - 1);
  refused_or([&] {
    if (data[0] & 1) {
      const auto address = kvxfer::ibv::EndpointAddress::decode(bytes);
      check(std::ranges::equal(address.encode(), bytes), "encodes to other bytes");
      // Choosing paths is what is done with it, against itself and against nothing.
      kvxfer::ibv::choose_paths(address, address);
      kvxfer::ibv::choose_paths(address, {});
    } else {
      const auto message = kvxfer::ibv::PathMessage::decode(bytes);
      check(std::ranges::equal(message.encode(), bytes), "encodes to other bytes");
    }
  });
  return 0;
}
