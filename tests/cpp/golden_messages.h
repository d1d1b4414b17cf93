#ifndef KVXFER_TESTS_GOLDEN_MESSAGES_H_
#define KVXFER_TESTS_GOLDEN_MESSAGES_H_

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "wire/messages.h"

// Messages that tests of the wire encode, decode and damage.
namespace kvxfer::wire {

using Body = std::span<const std::byte>;

constexpr uint64_t kId = 0x0102030405060708;

template <size_t kBytes = 16>
std::array<std::byte, kBytes> generation_from(uint8_t first) {
  std::array<std::byte, kBytes> bytes;
  for (std::byte& value : bytes) value = std::byte{first++};
  return bytes;
}

// The values behind tests/golden/wire_v4.txt.
inline const Hello kHello{4, 0x1122334455667788, "prefill-0", 1u << 20, 31};
inline const Layout kLayout{7,
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
inline const Fetch kFetch{kId,
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
inline const Accept kAccept{
    kId, {2, 0, 1, 4, 3},          1, 33,   0x123456789a,   32,        31, 3, 2,
    48,  {{4, 0, 0}, {3, 1, 128}}, 4, 3097, {0.125f, 2.0f}, "as asked"};
inline const Commit kCommit{kId, 32, 3, 0xfedcb, {0xdeadbeefcafef00d, 0x0badc0de12345678}};
inline const Refused kRefused{kId, StatusCode::kBusy, "try again", 1500};
inline const Credit kCredit{kId, {9, 0, 127}};
inline const Decline kDecline{kId, "request-42", generation_from(0xa0), 7, 4, 1};
inline const Memory kMemory{7, {std::byte{0xab}, std::byte{0xcd}, std::byte{0xef}}};
inline const FetchDirect kFetchDirect{kFetch, FetchDirect::kDirect, {70, 0, 999}};
inline const AcceptDirect kAcceptDirect{kAccept, 1, "as set"};
inline const GpuArena kGpuArena{
    2,        1,       generation_from(0x10),     "0000:c1:00.0",
    0x200000, 0x18000, generation_from<32>(0x40), generation_from<64>(0x80)};
inline const FetchGpu kFetchGpu{kFetch, 2};
inline const AcceptGpu kAcceptGpu{kAccept, 1, "both on"};
inline const GpuTrial kGpuTrial{2, 14};
inline const GpuTried kGpuTried{2, 14, "lost"};
inline const Renew kRenew{"request-42", generation_from(0xa0)};

inline Bytes from_hex(const std::string& text) {
  REQUIRE(text.size() % 2 == 0);
  Bytes bytes;
  for (size_t i = 0; i < text.size(); i += 2) {
    bytes.push_back(static_cast<std::byte>(std::stoul(text.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

inline const std::map<std::string, Bytes>& golden() {
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

inline Body body_of(const Bytes& message) { return Body(message).subspan(1); }

inline std::string protocol_error(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    CHECK(error.code() == StatusCode::kProtocol);
    return error.what();
  }
  return "";
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

}  // namespace kvxfer::wire

#endif  // KVXFER_TESTS_GOLDEN_MESSAGES_H_
