#ifndef KVXFER_BASE_BYTE_IO_H_
#define KVXFER_BASE_BYTE_IO_H_

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "kvxfer/status.h"

namespace kvxfer {

// Appends little-endian fields to a buffer.
class ByteWriter {
 public:
  template <std::unsigned_integral T>
  void put(T value) {
    for (size_t i = 0; i < sizeof(T); ++i) {
      bytes_.push_back(static_cast<std::byte>(value & 0xff));
      if constexpr (sizeof(T) > 1) value = static_cast<T>(value >> 8);
    }
  }
  void put_signed(int64_t value) { put(static_cast<uint64_t>(value)); }
  void put_raw(std::span<const std::byte> raw) {
    bytes_.insert(bytes_.end(), raw.begin(), raw.end());
  }
  void put_string(const std::string& text) {
    put(static_cast<uint32_t>(text.size()));
    put_raw(std::as_bytes(std::span(text)));
  }
  void put_list(std::span<const uint32_t> values) {
    put(static_cast<uint32_t>(values.size()));
    for (uint32_t value : values) put(value);
  }

  std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  std::vector<std::byte> bytes_;
};

// Reads what ByteWriter wrote, from bytes that a peer sent and that may be anything. Every read is
// checked; what does not fit throws Error(kProtocol).
class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <std::unsigned_integral T>
  T get() {
    auto raw = take(sizeof(T));
    uint64_t value = 0;
    for (size_t i = sizeof(T); i-- > 0;) value = value << 8 | static_cast<uint64_t>(raw[i]);
    return static_cast<T>(value);
  }
  int64_t get_signed() { return static_cast<int64_t>(get<uint64_t>()); }
  template <size_t N>
  std::array<std::byte, N> get_array() {
    std::array<std::byte, N> out;
    std::memcpy(out.data(), take(N).data(), N);
    return out;
  }
  std::string get_string(uint32_t limit) {
    const auto size = get<uint32_t>();
    check_count(size, limit, "a string", 1);
    auto raw = take(size);
    return std::string(reinterpret_cast<const char*>(raw.data()), raw.size());
  }
  std::vector<uint32_t> get_list(uint32_t limit) {
    const auto size = get<uint32_t>();
    check_count(size, limit, "a list", sizeof(uint32_t));
    std::vector<uint32_t> out(size);
    for (uint32_t& value : out) value = get<uint32_t>();
    return out;
  }
  // Bounds a count before anything is allocated for it.
  void check_count(uint32_t count, uint32_t limit, const char* what, size_t bytes_each) const {
    if (count > limit || count * bytes_each > bytes_.size()) {
      throw Error(StatusCode::kProtocol,
                  "message holds " + std::string(what) + " of " + std::to_string(count) +
                      " elements, where " + std::to_string(limit) + " elements and " +
                      std::to_string(bytes_.size()) + " bytes are the limits");
    }
  }
  void expect_end() const {
    if (!bytes_.empty()) {
      throw Error(StatusCode::kProtocol,
                  "message has " + std::to_string(bytes_.size()) + " bytes too many");
    }
  }

 private:
  std::span<const std::byte> take(size_t size) {
    if (size > bytes_.size()) {
      throw Error(StatusCode::kProtocol, "message ends early: " + std::to_string(size) +
                                             " bytes wanted, " + std::to_string(bytes_.size()) +
                                             " left");
    }
    auto out = bytes_.first(size);
    bytes_ = bytes_.subspan(size);
    return out;
  }

  std::span<const std::byte> bytes_;
};

}  // namespace kvxfer

#endif  // KVXFER_BASE_BYTE_IO_H_
