#ifndef KVXFER_TESTS_LIES_H_
#define KVXFER_TESTS_LIES_H_

#include <array>
#include <concepts>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "message_fields.h"

namespace kvxfer::testing {

using Said =
    std::variant<wire::Hello, wire::Layout, wire::Fetch, wire::Accept, wire::Commit, wire::Refused,
                 wire::Credit, wire::Want, wire::Decline, wire::Renew, OfFetch, Ping, Bye>;

inline wire::Bytes encode(const Said& said) {
  return std::visit([](const auto& message) { return message.encode(); }, said);
}

// Tells one lie in one field of a message: the n-th of all that it knows.
class Liar {
 public:
  // `foreign`: numbers that mean something, but are another's.
  Liar(size_t n, const std::vector<uint64_t>& foreign) : left_(n), foreign_(foreign) {}
  bool told() const { return told_; }

  template <typename Field>
  void operator()(Field& field) {
    if (!told_) lie(field);
  }

 private:
  bool turn() { return !told_ && left_-- == 0 && (told_ = true); }

  void lie(std::integral auto& field) {
    using Number = std::remove_reference_t<decltype(field)>;
    using Limits = std::numeric_limits<Number>;
    const auto value = static_cast<uint64_t>(field);
    for (const uint64_t other :
         {uint64_t{0}, uint64_t{1}, value - 1, value + 1, 2 * value, value ^ 0x80, value << 8,
          uint64_t{1} << 16, uint64_t{1} << 31, uint64_t{1} << 63,
          static_cast<uint64_t>(Limits::max()), static_cast<uint64_t>(Limits::max()) - 1,
          static_cast<uint64_t>(Limits::min())}) {
      if (turn()) field = static_cast<Number>(other);
    }
    for (const uint64_t other : foreign_) {
      if (turn()) field = static_cast<Number>(other);
    }
  }
  void lie(float& field) {
    for (const float other : {0.0f, -1.0f, 2.0f, std::numeric_limits<float>::infinity(),
                              std::numeric_limits<float>::quiet_NaN()}) {
      if (turn()) field = other;
    }
  }
  void lie(StatusCode& field) {
    for (const int other : {0, 1, 2, 3, 14, 15, 255}) {
      if (turn()) field = static_cast<StatusCode>(other);
    }
  }
  void lie(std::string& field) {
    const std::string value = field;
    for (const std::string& other :
         {std::string(), std::string("x"), value + "x", std::string(1024, 'x'),
          std::string(1025, 'x'), std::string(8193, 'x'), std::string("\xff\xfe\0", 3)}) {
      if (turn()) field = other;
    }
  }
  template <typename Element, size_t size>
  void lie(std::array<Element, size>& field) {
    for (const int other : {0, 1, 255}) {
      if (turn()) field.fill(static_cast<Element>(other));
    }
    if (turn()) field[0] = static_cast<Element>(static_cast<int>(field[0]) ^ 1);
    if (turn()) std::swap(field[0], field[size - 1]);
  }
  template <typename Element>
  void lie(std::vector<Element>& field) {
    const Element one = field.empty() ? Element{} : field.front();
    const size_t count = field.size();
    for (const size_t other :
         {size_t{0}, count / 2, count + 1, 2 * count, size_t{100}, size_t{4096}, size_t{4097},
          size_t{1} << 16, (size_t{1} << 16) + 1}) {
      if (turn()) field.resize(other, one);
    }
    if (told_ || field.empty()) return;
    if constexpr (std::is_class_v<Element> && !std::is_same_v<Element, std::string>) {
      visit(field.front(), *this);
    } else {
      lie(field.front());
    }
  }

  size_t left_;
  const std::vector<uint64_t>& foreign_;
  bool told_ = false;
};

// The n-th lie in place of a message; nothing when there are no more.
inline std::optional<Said> lie_for(const Said& honest, size_t n,
                                   const std::vector<uint64_t>& foreign) {
  Said said = honest;
  Liar liar(n, foreign);
  std::visit([&](auto& message) { visit(message, liar); }, said);
  if (!liar.told()) return std::nullopt;
  return said;
}

}  // namespace kvxfer::testing

#endif  // KVXFER_TESTS_LIES_H_
