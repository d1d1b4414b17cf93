// What the two ends of a verbs link say about themselves, about paths, and about memory.

#include <cstddef>
#include <cstdint>
#include <span>

#include "check.h"
#include "transport/verbs/address.h"
#include "transport/verbs/control.h"
#include "transport/verbs/direct.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(data) + 1, size - 1);
  refused_or([&] {
    if (data[0] & 2) {
      // What it says that it holds has an address, a piece and a key.
      const size_t rails = data[0] >> 6;
      const kvxfer::ibv::Target target(bytes, rails);
      for (uint64_t offset = 0, step = 1; step != 0; offset += step, step *= 2) {
        if (!target.holds(offset, 1)) continue;
        const uint64_t left = target.piece_left(offset);
        check(left > 0, "a piece has no bytes");
        for (size_t rail = 0; rail < rails; ++rail) static_cast<void>(target.rkey(rail, offset));
      }
    } else if (data[0] & 1) {
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
