#ifndef KVXFER_LAYOUT_ADDRESS_H_
#define KVXFER_LAYOUT_ADDRESS_H_

#include <cstddef>
#include <cstdint>

namespace kvxfer {

// Arithmetic on addresses that need not belong to this process: a peer's layout is planned with
// too.

inline std::byte* address_at(std::byte* base, int64_t offset) {
  return reinterpret_cast<std::byte*>(reinterpret_cast<uintptr_t>(base) +
                                      static_cast<uintptr_t>(offset));
}

inline int64_t address_difference(const std::byte* to, const std::byte* from) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) - reinterpret_cast<uintptr_t>(from));
}

}  // namespace kvxfer

#endif  // KVXFER_LAYOUT_ADDRESS_H_
